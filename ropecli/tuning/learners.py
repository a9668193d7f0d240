"""The parameters that `--level heads` and `--level lora` train, and how they are folded into the weights.

heads: a gain and a phase for each query head and rotary pair, and one temperature. Both dimensions of a pair are
rotated by the phase and multiplied by the gain. This commutes with the rotation by positions, so it can be folded into
the rows of the query projection. The temperature is a gain shared by all pairs, like YaRN's attention factor. If the
queries come from a norm, its weight can hold gains but no phases.

lora: LoRA (Hu et al. 2021, arXiv:2106.09685) on the query and key projections.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ropecli.errors import PatchError
from ropecli.training import adapters
from ropecli.training.recipe import make_recipe
from ropecli.training.target_modules import attention_projections, linear_modules
from ropecli.tuning.queries import find_queries
from ropecli.tuning.tune_report import LayerGains

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GAIN_RATE, TEMPERATURE_RATE = 0.03, 0.003
"""Learning rates of gains and phases, and of the temperature."""
LORA_RATE = 3e-3
"""On the demo checkpoint, 1e-3 learns less in the same steps; 1e-2 learns slightly more but needs more sequences."""
_QUERY_OR_KEY = ("q", "k", "wq", "wk")
"""Prefixes of the names of query and key projections, including fused ones."""


class HeadGains:
    """Gains, phases and the temperature, initialized to zero, which has no effect.

    log_gain, phase: per layer, shape (heads, pairs), float32; (1, pairs) if all heads share one norm. Norms have no
    phase (an empty tensor). log_temperature: shared by all layers.
    """

    def __init__(self, model: "PreTrainedModel", labels: Sequence[str | None]) -> None:
        """labels: the layer types to tune (None if all layers share one rope).

        Raises PatchError if the weights cannot hold the gains.
        """
        self.model, self.queries = model, find_queries(model, labels)
        shapes = [one.rows.shape[1:] for one in self.queries]
        phase_shapes = [one.rows.shape[1:] if one.projection else (0, 0) for one in self.queries]
        self.log_gain = [nn.Parameter(torch.zeros(shape, device=model.device)) for shape in shapes]
        self.phase = [nn.Parameter(torch.zeros(shape, device=model.device)) for shape in phase_shapes]
        self.log_temperature = nn.Parameter(torch.zeros((), device=model.device))

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameter groups with their learning rates."""
        phases = [phase for phase in self.phase if phase.numel()]
        return [([*self.log_gain, *phases], GAIN_RATE), ([self.log_temperature], TEMPERATURE_RATE)]

    @property
    def weights(self) -> list[str]:
        """Names of the weights and biases that hold the gains after folding."""
        modules = {one.name: self.model.get_submodule(one.name) for one in self.queries}
        return [
            f"{name}.{key}" for name, module in modules.items() for key, _ in module.named_parameters(recurse=False)
        ]

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Apply the gains in the model, with gradients."""
        modules = [self.model.get_submodule(one.name) for one in self.queries]
        handles = [module.register_forward_hook(self._hook(layer)) for layer, module in enumerate(modules)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: int) -> Any:
        def after(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            wide = output.to(torch.promote_types(output.dtype, torch.float32))
            return self._changed(layer, wide).to(output.dtype)

        return after

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """The weights with the gains folded in, by name, float64, on the CPU."""
        folded: dict[str, Tensor] = {}
        for layer, one in enumerate(self.queries):
            module = self.model.get_submodule(one.name)
            for key, parameter in module.named_parameters(recurse=False):
                values = parameter.detach().to("cpu", torch.float64)
                if one.projection:  # rows are the first dimension of the weight, but the last of the output
                    changed = self._changed(layer, values.movedim(0, -1)).movedim(-1, 0)
                else:
                    offset = _offset(module) if key == "weight" else 0.0
                    changed = self._changed(layer, values + offset) - offset
                folded[f"{one.name}.{key}"] = changed
        return folded

    def _changed(self, layer: int, values: Tensor) -> Tensor:
        """Rotate and scale the two rows of each pair. values: the module's rows are the last dimension."""
        first_row, second_row = self.queries[layer].rows.to(values.device)
        first, second = values[..., first_row], values[..., second_row]
        log_gain, phase = self.log_gain[layer].to(values), self.phase[layer].to(values)
        gain = torch.exp(log_gain + self.log_temperature.to(values))
        phase = phase if phase.numel() else torch.zeros_like(gain)
        cos, sin = gain * phase.cos(), gain * phase.sin()
        changed = values.clone()
        changed[..., first_row] = cos * first - sin * second
        changed[..., second_row] = sin * first + cos * second
        return changed

    def record(self) -> dict[str, Any]:
        """The learned parameters as fields of the report."""
        layers = zip(self.queries, self.log_gain, self.phase, strict=True)
        gains = [LayerGains(one.name, log_gain.tolist(), phase.tolist()) for one, log_gain, phase in layers]
        return {"gains": gains, "log_temperature": float(self.log_temperature.detach())}


def _offset(norm: nn.Module) -> float:
    """The constant that the norm adds to its weight: 1 in Gemma, 0 in most models."""
    zeroed: Any = copy.deepcopy(norm).to("cpu", torch.float32)
    for parameter in zeroed.parameters():
        parameter.zero_()
    states = torch.linspace(-1, 2, zeroed.weight.numel()).reshape(zeroed.weight.shape)
    return 1.0 if bool(zeroed(states).any()) else 0.0


class LowRankUpdates:
    """LoRA from peft, with alpha = 2 × rank. The model has the adapter only inside `live`."""

    def __init__(self, model: "PreTrainedModel", rank: int, seed: int) -> None:
        """Raises PatchError for a model without linear projections of queries or keys."""
        found = attention_projections(model, linear_modules(model))
        names = [name for name in found if name.rpartition(".")[2].lower().startswith(_QUERY_OR_KEY)]
        if not names:
            raise PatchError(f"{type(model).__name__} has no linear projection of queries or keys for LoRA.")
        targets = tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))
        lora = {"adapter": "lora", "lora_rank": rank, "lora_alpha": 2 * rank, "lora_targets": targets}
        self.model = model
        self.weights = [f"{name}.weight" for name in names]
        self._recipe = make_recipe(None, {"data": "calibration", "seed": seed, **lora})

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """The parameter group with its learning rate; only inside `live`."""
        return [([parameter for _, parameter in adapters.trainable(self.model)], LORA_RATE)]

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Attach the adapter; remove it at the end."""
        adapters.attach(self.model, self._recipe)
        try:
            yield
        finally:
            for name, layer in self._layers().items():
                self.model.set_submodule(name, layer.get_base_layer())

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """The weights with the updates added, by name, float64, on the CPU; only inside `live`."""
        return {
            f"{name}.weight": layer.get_base_layer().weight.detach().to("cpu", torch.float64)
            + layer.get_delta_weight(adapters.ADAPTER).to("cpu", torch.float64)
            for name, layer in self._layers().items()
        }

    def _layers(self) -> dict[str, Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return {name: module for name, module in self.model.named_modules() if isinstance(module, BaseTunerLayer)}

    def record(self) -> dict[str, Any]:
        """No additional fields of the report."""
        return {}
