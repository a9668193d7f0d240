"""What `--level heads` learns: a complex gain for every query head and rotary pair, and one temperature.

Both dimensions of a pair are rotated by a phase and multiplied by a gain. That commutes with the rotation by positions,
so that it may happen before it: in the rows of the projection that gives the queries. An attention temperature is a
gain that all pairs share, as YaRN's attention factor is. Where a norm gives the queries, its weight can hold gains, and
no phases.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ropecli.tuning.queries import find_queries
from ropecli.tuning.tune_report import LayerGains

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RATE, TEMPERATURE_RATE = 0.03, 0.003
"""Learning rates of gains and phases, and of the temperature."""


class HeadGains:
    """Parameters by layer, all zero at first, where nothing changes; float32.

    log_gain, phase: shape (heads, pairs), or (1, pairs) where all heads share one norm; phase is empty for norms.
    log_temperature: of all layers.
    """

    def __init__(self, model: "PreTrainedModel", labels: Sequence[str | None]) -> None:
        """For the layers that rotate by the ropes of these labels. Raises PatchError where nothing could be folded."""
        self.model, self.queries = model, find_queries(model, labels)
        shapes = [one.rows.shape[1:] for one in self.queries]
        phase_shapes = [one.rows.shape[1:] if one.projection else (0, 0) for one in self.queries]
        self.log_gain = [nn.Parameter(torch.zeros(shape, device=model.device)) for shape in shapes]
        self.phase = [nn.Parameter(torch.zeros(shape, device=model.device)) for shape in phase_shapes]
        self.log_temperature = nn.Parameter(torch.zeros((), device=model.device))

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """What is trained, with its learning rate."""
        phases = [phase for phase in self.phase if phase.numel()]
        return [([*self.log_gain, *phases], RATE), ([self.log_temperature], TEMPERATURE_RATE)]

    @property
    def weights(self) -> list[str]:
        """The parameters of the model that can hold them: weights and biases."""
        modules = {one.name: self.model.get_submodule(one.name) for one in self.queries}
        return [
            f"{name}.{key}" for name, module in modules.items() for key, _ in module.named_parameters(recurse=False)
        ]

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """The model attends with them; gradients reach them."""
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
        """The weights of the model that hold them, by name, float64, on the CPU."""
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
        """values: with the module's rows in the last dimension. The two rows of each pair, rotated and multiplied."""
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
        """What the report says of them."""
        layers = zip(self.queries, self.log_gain, self.phase, strict=True)
        gains = [LayerGains(one.name, log_gain.tolist(), phase.tolist()) for one, log_gain, phase in layers]
        return {"gains": gains, "log_temperature": float(self.log_temperature.detach())}


def _offset(norm: nn.Module) -> float:
    """What the norm adds to its weight before it multiplies by it: 1 in Gemma's, 0 in most."""
    zeroed: Any = copy.deepcopy(norm).to("cpu", torch.float32)
    for parameter in zeroed.parameters():
        parameter.zero_()
    states = torch.linspace(-1, 2, zeroed.weight.numel()).reshape(zeroed.weight.shape)
    return 1.0 if bool(zeroed(states).any()) else 0.0
