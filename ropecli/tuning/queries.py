"""Find the weights that produce a layer's queries, by tracing them through the model.

A hook replaces a module's output by its row indices in binary, one digit per sequence. If the queries in the attention
contain these digits unchanged, the module produces them. All tokens are at position 0, where nothing rotates. This
works for fused projections, interleaved heads and MLA without a table of architectures.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ropecli.attention.head_layout import HeadLayout, attending_by, causal_attention, find_rotating_layers, layer_label
from ropecli.errors import PatchError
from ropecli.live.rotary import rotary_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_DIGITS = 19
"""Binary digits, enough for half a million rows."""
_SAME = 1e-2
"""Relative difference between equal digits: half precision's rounding of an attention factor."""


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

    def mask(self, *, batch_size: int, **others: Any) -> Tensor:
        return torch.zeros((batch_size, 1, 1, 1), dtype=torch.int64)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any
    ) -> tuple[Tensor, None]:
        self.queries[module] = query[:, :, 0].float()
        return causal_attention(query, key, value, others.get("scaling")), None


def _candidates(layers: list[Any]) -> list[str]:
    """Names of the attention's modules with a weight, in order of definition. The last one that fits is used."""
    names = [name for layer in layers for name, module in layer.named_modules() if name and _has_weight(module)]
    return list(dict.fromkeys(names))


def _has_weight(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim in (1, 2)


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
    alike = (digits - written * ones).abs() <= _SAME * ones.abs()
    numbers = (written.long() << torch.arange(_DIGITS, device=query.device)[:, None, None]).sum(dim=0) - 1
    sound = alike.all(dim=0) & (ones > 0) & (numbers >= 0) & (numbers < size)
    return torch.where(sound, numbers, -1).cpu()
