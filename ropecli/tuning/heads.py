"""The level `heads`: gains and phases of the queries, and gains of the norms, folded into the weights.

There is a gain and a phase for each query head and rotary pair, one temperature, and a gain for each dimension of every
norm. Both dimensions of a pair are rotated by the phase and multiplied by the gain. This commutes with the rotation by
positions, so it can be folded into the rows of the query projection. The temperature is a gain shared by all pairs,
like YaRN's attention factor. If the queries come from a norm, its weight can hold gains but no phases. The gains of the
other norms multiply their weights and biases.

`find_queries` traces the weights that produce a layer's queries through the model. A hook replaces a module's output by
its row indices in binary, one digit per sequence. If the queries in the attention contain these digits unchanged, the
module produces them. All tokens are at position 0, where nothing rotates. This works for fused projections, interleaved
heads and MLA without a table of architectures.
"""

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ropecli.attention.head_layout import HeadLayout, attending_by, causal_attention, find_rotating_layers, layer_label
from ropecli.errors import PatchError
from ropecli.live.rotary import rotary_tables
from ropecli.training import adapters
from ropecli.training.adapters import norm_modules
from ropecli.tuning.task import LayerGains

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GAIN_RATE, TEMPERATURE_RATE = 0.03, 0.003
"""Learning rates of gains and phases, and of the temperature."""
NORM_RATE = 0.01
"""Learning rate of the logarithms of the norms' gains. On the demo, 0.02 learns no more, and overfits 16 sequences."""
_DIGITS = 19
"""Binary digits, enough for half a million rows."""
_SAME = 1e-2
"""Relative difference between equal digits: half precision's rounding of an attention factor."""
_Change = Callable[[Tensor], Tensor]


class HeadGains:
    """Gains, phases, the temperature and the norms' gains, initialized to zero, which has no effect.

    log_gain, phase: per layer, shape (heads, pairs), float32; (1, pairs) if all heads share one norm. Norms have no
    phase (an empty tensor). log_temperature: shared by all layers. norm_log_gain: by the norm's name, the shape of its
    weight.
    """

    def __init__(self, model: "PreTrainedModel", labels: Sequence[str | None]) -> None:
        """labels: the layer types to tune (None if all layers share one rope).

        Raises PatchError if the weights cannot hold the gains.
        """
        self.model, self.queries = model, find_queries(model, labels)

        def zeros(shape: Sequence[int]) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, device=model.device))

        self.log_gain = [zeros(queries.rows.shape[1:]) for queries in self.queries]
        self.phase = [zeros(queries.rows.shape[1:] if queries.projection else (0, 0)) for queries in self.queries]
        self.log_temperature = zeros(())
        shared = {name for _, names in adapters.all_names(model) if len(names) > 1 for name in names}
        query_modules = {queries.name for queries in self.queries}
        if not shared.isdisjoint(f"{name}.weight" for name in query_modules):
            raise PatchError("Some layers share the weights of their queries, which cannot hold gains of each layer.")
        self._offset = {name: _offset(norm) for name, norm in norm_modules(model).items()}
        self.norm_log_gain = {
            name: nn.Parameter(torch.zeros_like(model.get_parameter(f"{name}.weight"), dtype=torch.float32))
            for name, offset in self._offset.items()
            if offset is not None and name not in query_modules and f"{name}.weight" not in shared
        }

    @property
    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """Parameter groups with their learning rates."""
        phases = [phase for phase in self.phase if phase.numel()]
        return [
            ([*self.log_gain, *phases], GAIN_RATE),
            ([self.log_temperature], TEMPERATURE_RATE),
            ([*self.norm_log_gain.values()], NORM_RATE),
        ]

    @property
    def count(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for group, _ in self.groups for parameter in group)

    @property
    def weights(self) -> list[str]:
        """Names of the weights and biases that hold the gains after folding."""
        return [f"{name}.{key}" for name in self._changes for key, _ in self._parameters(name)]

    def _parameters(self, name: str) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.get_submodule(name).named_parameters(recurse=False))

    @property
    def _changes(self) -> dict[str, _Change]:
        """By the module's name, the change of its output."""
        return {
            **{queries.name: partial(self._rotated, layer) for layer, queries in enumerate(self.queries)},
            **{name: partial(self._scaled, name) for name in self.norm_log_gain},
        }

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Apply the gains in the model, with gradients."""
        with contextlib.ExitStack() as handles:
            for name, change in self._changes.items():
                handle = self.model.get_submodule(name).register_forward_hook(_hook(change))
                handles.callback(handle.remove)
            yield

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """The weights with the gains folded in, by name, float64, on the CPU."""
        folded: dict[str, Tensor] = {}
        projections = {queries.name for queries in self.queries if queries.projection}
        for name, change in self._changes.items():
            for key, parameter in self._parameters(name):
                values = parameter.detach().to("cpu", torch.float64)
                if name in projections:  # rows are the first dimension of the weight, but the last of the output
                    changed = change(values.movedim(0, -1)).movedim(-1, 0)
                else:
                    offset = (self._offset.get(name) or 0.0) if key == "weight" else 0.0
                    changed = change(values + offset) - offset
                folded[f"{name}.{key}"] = changed
        return folded

    def _scaled(self, name: str, values: Tensor) -> Tensor:
        return values * torch.exp(self.norm_log_gain[name].to(values))

    def _rotated(self, layer: int, values: Tensor) -> Tensor:
        """Rotate and scale the two rows of each pair. values: the module's rows are the last dimension."""
        first_row, second_row = self.queries[layer].rows.to(values.device)
        first, second = values[..., first_row], values[..., second_row]
        gain = torch.exp(self.log_gain[layer].to(values) + self.log_temperature.to(values))
        phase = self.phase[layer].to(values) if self.phase[layer].numel() else torch.zeros_like(gain)
        cos, sin = gain * phase.cos(), gain * phase.sin()
        changed = values.clone()
        changed[..., first_row] = cos * first - sin * second
        changed[..., second_row] = sin * first + cos * second
        return changed

    def record(self) -> dict[str, Any]:
        """The learned parameters as fields of the report."""
        layers = zip(self.queries, self.log_gain, self.phase, strict=True)
        gains = [LayerGains(queries.name, log_gain.tolist(), phase.tolist()) for queries, log_gain, phase in layers]
        return {"gains": gains, "log_temperature": float(self.log_temperature.detach())}


def _hook(change: _Change) -> Any:
    """A forward hook that changes a module's output, computed in float32 at least."""

    def after(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        wide = output.to(torch.promote_types(output.dtype, torch.float32))
        return change(wide).to(output.dtype)

    return after


@torch.no_grad()
def _offset(norm: nn.Module) -> float | None:
    """The constant that the norm adds to its weight: 1 in Gemma, 0 in most models.

    None if doubling the sum and the bias does not double the output.
    """
    plain: Any = copy.deepcopy(norm).to("cpu", torch.float32)
    for offset in (0.0, 1.0):
        doubled: Any = copy.deepcopy(plain)
        for key, parameter in doubled.named_parameters(recurse=False):
            parameter.mul_(2).add_(offset if key == "weight" else 0.0)
        try:
            states = torch.linspace(-1, 2, plain.weight.numel()).reshape(plain.weight.shape)
            if torch.allclose(doubled(states), 2 * plain(states), rtol=1e-4, atol=1e-6):
                return offset
        except (AttributeError, RuntimeError, TypeError):  # needs further inputs
            return None
    return None


class Queries(NamedTuple):
    """The last module that produces a layer's queries.

    name: its name in the model. rows: shape (2, heads, pairs), the output indices of the first and second dimension of
    each pair; (2, 1, pairs) if all heads share one norm. projection: whether it is linear; the weight of a norm can
    scale a pair but not rotate it.
    """

    name: str
    rows: Tensor
    projection: bool


def find_queries(model: "PreTrainedModel", labels: Collection[str | None]) -> list[Queries]:
    """Find the queries of every layer that rotates by a rope of these labels (layer types; None if all share one).

    Restores the model. Raises PatchError if a layer's queries do not come directly from a module with a weight, or
    rotate in an unknown way (see head_layout.find_rotating_layers).
    """
    pairs = {table.layer_type: len(table.inv_freq) for table in rotary_tables(model)}
    layout, layers = find_rotating_layers(model, labels)
    capture, names = _QueryCapture(), {module: name for name, module in model.named_modules()}
    queries: dict[int, Queries] = {}
    with attending_by(model, capture):
        for name in _candidates(layers):
            for layer, numbers in _trace_rows(model, capture, layers, name).items():
                rows = _rows(numbers, layout, pairs[layer_label(layer, pairs)])
                if bool((rows >= 0).all()):
                    module = layer.get_submodule(name)
                    queries[layers.index(layer)] = Queries(names[module], rows, isinstance(module, torch.nn.Linear))
    for index, layer in enumerate(layers):
        if index not in queries:
            raise PatchError(
                f"Layer {getattr(layer, 'layer_idx', index)} ({type(layer).__name__}): its queries do not come "
                "directly from a projection or a norm, so gains cannot be folded into a weight."
            )
    return [queries[index] for index in range(len(layers))]


def _rows(numbers: Tensor, layout: HeadLayout, pairs: int) -> Tensor:
    """Queries.rows from the row index of each head and dimension."""
    at = layout.rotary_start + (2 if layout.neighbours else 1) * torch.arange(pairs)
    rows = torch.stack([numbers[:, at], numbers[:, at + (1 if layout.neighbours else pairs)]])
    same_for_all_heads = bool((rows == rows[:, :1]).all())
    return rows[:, :1] if same_for_all_heads else rows


class _QueryCapture:
    """An attention function that records the queries, and a mask function."""

    def __init__(self) -> None:
        self.queries: dict[Any, Tensor] = {}

    def mask(self, *, batch_size: int, **arguments: Any) -> Tensor:
        return torch.zeros((batch_size, 1, 1, 1), dtype=torch.int64)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
    ) -> tuple[Tensor, None]:
        self.queries[module] = query[:, :, 0].float()
        return causal_attention(query, key, value, arguments.get("scaling")), None


def _candidates(layers: list[Any]) -> list[str]:
    """Names of the attention's modules with a weight, in order of definition. The last one that fits is used."""
    modules = [(name, module) for layer in layers for name, module in layer.named_modules() if name]
    weights = [(name, getattr(module, "weight", None)) for name, module in modules]
    return list(dict.fromkeys(name for name, weight in weights if getattr(weight, "ndim", 0) in (1, 2)))


def _trace_rows(model: "PreTrainedModel", capture: _QueryCapture, layers: list[Any], name: str) -> dict[Any, Tensor]:
    """For each layer, the row of this module's output that each query dimension comes from, or -1.

    Shape (heads, width).
    """
    sizes: dict[Any, int] = {}

    def give_numbers(module: Any, arguments: Any, output: Any) -> Any:
        """Row numbers starting at 1, one binary digit per sequence, and ones in the last sequence."""
        if not isinstance(output, Tensor):
            return output
        sizes[module] = size = output.shape[-1]
        numbers = torch.arange(1, size + 1, device=output.device)
        digits = (numbers >> torch.arange(_DIGITS, device=output.device)[:, None]) & 1
        rows = torch.cat([digits, torch.ones_like(digits[:1])]).to(output.dtype)
        return rows.reshape(_DIGITS + 1, *[1] * (output.ndim - 2), size).expand_as(output).clone()

    modules = {layer: dict(layer.named_modules()).get(name) for layer in layers}
    handles = [module.register_forward_hook(give_numbers) for module in modules.values() if module is not None]
    ids = torch.zeros((_DIGITS + 1, 1), dtype=torch.int64, device=model.device)
    try:
        model(input_ids=ids, use_cache=False)
    except (RuntimeError, IndexError, ValueError):  # the module's output has another meaning than one row per token
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return {
        layer: _read_numbers(capture.queries[layer], sizes[module])
        for layer, module in modules.items()
        if module in sizes
    }


def _read_numbers(query: Tensor, size: int) -> Tensor:
    """Read the row indices. query: shape (sequences, heads, width). A norm in between scales each sequence's digits."""
    ones, digits = query[-1], query[:-1]
    written = digits.abs() > ones.abs() / 2
    equal = (digits - written * ones).abs() <= _SAME * ones.abs()
    numbers = (written.long() << torch.arange(_DIGITS, device=query.device)[:, None, None]).sum(dim=0) - 1
    sound = equal.all(dim=0) & (ones > 0) & (numbers >= 0) & (numbers < size)
    return torch.where(sound, numbers, -1).cpu()
