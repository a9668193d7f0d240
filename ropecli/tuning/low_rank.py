"""What `--level lora` learns: LoRA on the projections that give queries and keys, merged into them at the end.

Source: Hu et al. 2021 (arXiv:2106.09685).
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ropecli.errors import PatchError
from ropecli.training import adapters
from ropecli.training.recipe import make_recipe
from ropecli.training.target_modules import attention_projections, linear_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RATE = 3e-3
"""On the demo checkpoint 1e-3 learns less in as many steps, 1e-2 a little more; few sequences want a smaller one."""
_PREFIXES = ("q", "k", "wq", "wk")
"""What the name of a projection of queries or keys begins with; fused ones too."""


class LowRankUpdates:
    """peft's LoRA of a rank, with alpha = 2 × rank. Beside the model it has no state but while it is live."""

    def __init__(self, model: "PreTrainedModel", rank: int, seed: int) -> None:
        """Raises PatchError for a model without linear projections of queries or keys."""
        self.model = model
        self._projections = _query_and_key_projections(model)
        targets = tuple(dict.fromkeys(name.rpartition(".")[2] for name in self._projections))
        lora = {"adapter": "lora", "lora_rank": rank, "lora_alpha": 2 * rank, "lora_targets": targets}
        self._recipe = make_recipe(None, {"data": "calibration", "seed": seed, **lora})
        self._merged: dict[str, Tensor] = {}

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """What is trained while it is live, with its learning rate."""
        return [([parameter for _, parameter in adapters.trainable(self.model)], RATE)]

    @property
    def weights(self) -> list[str]:
        """The parameters of the model that can hold the updates."""
        return [f"{name}.weight" for name in self._projections]

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """The model has the adapter; afterwards it is itself again, whatever ended the training."""
        adapters.attach(self.model, self._recipe)
        try:
            yield
        finally:
            self._merged = _take_out(self.model)

    def folded(self) -> dict[str, Tensor]:
        """The weights with the updates merged, by name, float64, on the CPU."""
        return self._merged

    def record(self) -> dict[str, Any]:
        """What the report says of them: nothing."""
        return {}


def _query_and_key_projections(model: Any) -> list[str]:
    found = attention_projections(model, linear_modules(model))
    names = [name for name in found if name.rpartition(".")[2].lower().startswith(_PREFIXES)]
    if not names:
        raise PatchError(f"{type(model).__name__} has no linear projection of queries or keys that LoRA could train.")
    return names


@torch.no_grad()
def _take_out(model: Any) -> dict[str, Tensor]:
    """Takes the adapter out of the model again; the weights with it merged, by their names, float64."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[str, Any] = {name: one for name, one in model.named_modules() if isinstance(one, BaseTunerLayer)}
    merged = {}
    for name, layer in layers.items():
        base = layer.get_base_layer()
        update = layer.get_delta_weight(adapters.ADAPTER)
        merged[f"{name}.weight"] = base.weight.detach().to("cpu", torch.float64) + update.to("cpu", torch.float64)
        model.set_submodule(name, base)
    return merged
