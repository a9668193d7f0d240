"""The parameters that `--level heads` and `--level lora` train, and the weights that hold them afterwards.

heads: a complex gain for every query head and rotary pair, and one temperature. Both dimensions of a pair are rotated
by a phase and multiplied by a gain. That commutes with the rotation by positions, so it may happen before it: in the
rows of the projection that gives the queries. An attention temperature is a gain that all pairs share, as YaRN's
attention factor is. Where a norm gives the queries, its weight can hold gains but no phases.

lora: LoRA (Hu et al. 2021, arXiv:2106.09685) on the projections that give queries and keys.
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
"""On the demo checkpoint 1e-3 learns less in as many steps, 1e-2 a little more, but needs more sequences."""
_QUERY_OR_KEY = ("q", "k", "wq", "wk")
"""Beginnings of the names of query and key projections, fused ones too."""


class HeadGains:
    """Gains, phases and the temperature; all zero at first, which changes nothing.

    log_gain, phase: by layer, shape (heads, pairs), float32; (1, pairs) where all heads share one norm. The phase is
    empty for norms. log_temperature: shared by all layers.
    """

    def __init__(self, model: "PreTrainedModel", labels: Sequence[str | None]) -> None:
        """labels: the layer types to tune (None where all layers share one rope).

        Raises PatchError where nothing could be folded.
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
        """The names of the model's weights and biases that can hold the gains."""
        modules = {one.name: self.model.get_submodule(one.name) for one in self.queries}
        return [
            f"{name}.{key}" for name, module in modules.items() for key, _ in module.named_parameters(recurse=False)
        ]

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """The model attends with the gains; gradients reach them."""
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
                if one.projection:  # its rows are the first dimension of its weight, and the last of its output
                    changed = self._changed(layer, values.movedim(0, -1)).movedim(-1, 0)
                else:
                    offset = _offset(module) if key == "weight" else 0.0
                    changed = self._changed(layer, values + offset) - offset
                folded[f"{one.name}.{key}"] = changed
        return folded

    def _changed(self, layer: int, values: Tensor) -> Tensor:
        """Rotates and multiplies the two rows of each pair. values: with the module's rows in the last dimension."""
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
        """The learned numbers as fields of the report."""
        layers = zip(self.queries, self.log_gain, self.phase, strict=True)
        gains = [LayerGains(one.name, log_gain.tolist(), phase.tolist()) for one, log_gain, phase in layers]
        return {"gains": gains, "log_temperature": float(self.log_temperature.detach())}


def _offset(norm: nn.Module) -> float:
    """The number that the norm adds to its weight before it multiplies by it: 1 in Gemma's, 0 in most."""
    zeroed: Any = copy.deepcopy(norm).to("cpu", torch.float32)
    for parameter in zeroed.parameters():
        parameter.zero_()
    states = torch.linspace(-1, 2, zeroed.weight.numel()).reshape(zeroed.weight.shape)
    return 1.0 if bool(zeroed(states).any()) else 0.0


class LowRankUpdates:
    """peft's LoRA, with alpha = 2 × rank. The model holds the adapter only while it is live."""

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
        """While live: the parameter group with its learning rate."""
        return [([parameter for _, parameter in adapters.trainable(self.model)], LORA_RATE)]

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """The model has the adapter; afterwards it is as it was."""
        adapters.attach(self.model, self._recipe)
        try:
            yield
        finally:
            for name, layer in self._layers().items():
                self.model.set_submodule(name, layer.get_base_layer())

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """While live: the weights with the updates added, by name, float64, on the CPU."""
        return {
            f"{name}.weight": layer.get_base_layer().weight.detach().to("cpu", torch.float64)
            + layer.get_delta_weight(adapters.ADAPTER).to("cpu", torch.float64)
            for name, layer in self._layers().items()
        }

    def _layers(self) -> dict[str, Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return {name: module for name, module in self.model.named_modules() if isinstance(module, BaseTunerLayer)}

    def record(self) -> dict[str, Any]:
        """No fields of the report."""
        return {}
