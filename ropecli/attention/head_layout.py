"""Finds which dimensions of a head rotate, and in which pairs, and proves that the attention can rotate them further.

The proof: two passes over the same tokens, the second at twice the positions, must give queries and keys that differ by
one more rotation by the positions. The attention's outputs of the first pass are given again in the second, so that
every layer sees the same hidden states, and whatever else depends on positions shows in the model's output.
Source of the rotation: Su et al. 2021 (arXiv:2104.09864), section 3.2.2.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropecli.attention.attention_probe import AttentionCall, AttentionProbe, attending_by
from ropecli.attention.rotation import Rotation
from ropecli.errors import NotFiniteError, PatchError, reason_of
from ropecli.live.rotary import RotaryTable, rotary_tables

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TOKENS = 24
# of a head's norm. Rounding of cos, sin and states leaves 1e-7, 5e-4 and 4e-3 of it, a wrong layout some 0.5
_ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


class HeadLayout(NamedTuple):
    """rotary_start: the first dimension of a head that rotates. neighbours: pair i is dimensions (2i, 2i + 1) of what
    rotates, in place of (i, i + pairs)."""

    rotary_start: int
    neighbours: bool


class _Seen(NamedTuple):
    """A layer's call of its attention at the model's positions, and at twice these."""

    before: AttentionCall
    after: AttentionCall

    @property
    def rotates(self) -> bool:
        return _difference(self.before.query, self.after.query) > _allowed(self.before.query) or (
            _difference(self.before.key, self.after.key) > _allowed(self.before.key)
        )


def find_layout(model: "PreTrainedModel") -> HeadLayout:
    """The layout of q and k in every layer that sees the whole context, proved on this model's own weights.

    The model is left as it was. Raises PatchError with the reason where rotating q and k in the attention
    function is not exact, and where some of the model's positions have another effect.
    """
    far = [layer for layer in _see_layers(model) if not layer.before.slides]
    if not far:
        raise PatchError(
            "Every layer looks back sliding_window tokens and no further; other distances have no meaning there."
        )
    still = [layer.before.name for layer in far if not layer.rotates]
    if still:
        raise PatchError(
            f"Of the layers that see the whole context, {len(still)} of {len(far)} do not rotate by the rotary tables "
            f"({still[0]} is the first): they have no positions, or others, which cannot be remapped."
        )
    return _common_layout(far, _frequencies(model))


def find_rotating_layers(model: "PreTrainedModel", labels: Collection[str | None]) -> tuple[HeadLayout, list[Any]]:
    """The layout of q and k, and the attention modules that rotate by the ropes of these labels.

    labels: layer types; None where all layers share one rope. Layers without positions are skipped. The model is left
    as it was. Raises PatchError as find_layout does, and where no layer rotates.
    """
    frequencies = _frequencies(model)
    rotating = [
        layer
        for layer in _see_layers(model)
        if layer.rotates and layer_label(layer.before.module, frequencies) in labels
    ]
    if not rotating:
        raise PatchError(f"No layer rotates by the rotary table of {', '.join(map(str, labels))}.")
    modules = {id(layer.before.module): layer.before.module for layer in rotating}  # some attend several times
    return _common_layout(rotating, frequencies), list(modules.values())


def layer_label(module: Any, labels: Collection[str | None]) -> str | None:
    """The rope label (layer type; None where all layers share one) that this attention module rotates by.

    Raises PatchError where its layer type is none of them.
    """
    if set(labels) == {None}:
        return None
    types = getattr(getattr(module, "config", None), "layer_types", None) or []
    index = getattr(module, "layer_idx", None)
    own = getattr(module, "layer_type", None)
    for label in (own, types[index] if index is not None and index < len(types) else None):
        if label in labels:
            return label
    raise PatchError(
        f"Layer {index} ({type(module).__name__}) does not say by which of the rotary tables it rotates: its type is "
        f"{own!r}, the tables are {sorted(map(str, labels))}. A method of other distances cannot be used here."
    )


def _frequencies(model: "PreTrainedModel") -> dict[str | None, np.ndarray]:
    return {table.layer_type: table.inv_freq for table in rotary_tables(model)}


def _see_layers(model: "PreTrainedModel") -> list[_Seen]:
    """Two passes. Raises PatchError where more than queries and keys depends on positions."""
    probe = AttentionProbe()
    with attending_by(model, probe):
        output, first = _run(model), probe.calls
        if not first:
            raise PatchError(
                "No layer calls an attention function of transformers' interface: the model attends by code of its "
                "own, or not at all, so that nothing can be seen or changed there."
            )
        _double(rotary_tables(model))
        probe.replay()
        output_of_second, second = _run(model), probe.calls
    if len(first) != len(second):
        raise PatchError("How often the model attends depends on the positions.")
    layers = [_Seen(*calls) for calls in zip(first, second, strict=True)]
    for before, after in layers:
        _refuse_not_finite(before)
        if _difference(before.value, after.value) > _allowed(before.value):
            raise PatchError(f"{before.name}: the values depend on the positions too, not only queries and keys.")
    if _difference(*(one.reshape(1, 1, 1, -1) for one in (output, output_of_second))) > _allowed(output):
        raise PatchError(
            "Some of the model's layers rotate by the rotary tables without calling the attention function."
        )
    return layers


def _run(model: "PreTrainedModel") -> Tensor:
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(_TOKENS, device=embeddings.weight.device)[None] % embeddings.weight.shape[0]
    try:
        return model(input_ids=ids, use_cache=False)[0]
    except PatchError:
        raise
    except Exception as error:  # models raise what they like
        raise PatchError(
            f"{type(model).__name__} does not run with another attention. Perhaps it works on the mask itself, as "
            f"sparse attention does: {reason_of(error)}"
        ) from error


def _double(tables: list[RotaryTable]) -> None:
    """Gives every rotary module twice the positions: some do not rotate by their table, but by the same numbers."""

    def before_pass(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if "position_ids" in named:
            return arguments, {**named, "position_ids": 2 * named["position_ids"]}
        return (arguments[0], 2 * arguments[1], *arguments[2:]), named

    for module in {id(table.module): table.module for table in tables}.values():
        module.register_forward_pre_hook(before_pass, with_kwargs=True)


def _refuse_not_finite(call: AttentionCall) -> None:
    if not all(one.isfinite().all() for one in (call.query, call.key, call.value)):
        raise NotFiniteError(
            f"{call.name} gets numbers that are not finite: there are some among the weights, or "
            f"{str(call.query.dtype).removeprefix('torch.')} cannot hold what they give."
        )


def _common_layout(layers: list[_Seen], frequencies: dict[str | None, np.ndarray]) -> HeadLayout:
    """The one layout by which all these layers rotate."""
    width = layers[0].before.query.shape[3]
    starts = sorted({0, *(width - 2 * inv_freq.size for inv_freq in frequencies.values())})
    layouts = [HeadLayout(start, neighbours) for start in starts for neighbours in (False, True)]
    for layer in layers:
        inv_freq = frequencies[layer_label(layer.before.module, frequencies)]
        layouts = [layout for layout in layouts if _rotates_by(layer, inv_freq, layout)]
        if not layouts:
            raise PatchError(
                f"{layer.before.name} changes queries or keys after the rotation, as a norm does, or rotates them by a "
                "rule of its own: rotating them further in the attention is not the same as other positions."
            )
    return layouts[0]


def _rotates_by(layer: _Seen, inv_freq: np.ndarray, layout: HeadLayout) -> bool:
    """Whether twice the positions are one more rotation by the positions."""
    before, after = layer
    tokens, width = before.query.shape[2:]
    if not 0 <= layout.rotary_start <= width - 2 * inv_freq.size:
        return False
    rotation, by = Rotation(inv_freq, *layout), np.arange(tokens)
    pairs = ((before.query, after.query), (before.key, after.key))
    return all(_difference(rotation.rotate(one, by), other) <= _allowed(one) for one, other in pairs)


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest over the heads, relative to the head's norm. Shape of both: (batch, heads, tokens, width)."""
    norm = one.double().norm(dim=(2, 3)).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((one.double() - other.double()).norm(dim=(2, 3)) / norm).max())


def _allowed(states: Tensor) -> float:
    return _ALLOWED[states.dtype]
