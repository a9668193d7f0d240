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

from ropecli.attention.attention_probe import AttentionCall, AttentionProbe, attending_by, in_evaluation
from ropecli.attention.rotation import Rotation
from ropecli.errors import NotFiniteError, PatchError, reason_of
from ropecli.live.rotary import RotaryTable, restored, rotary_tables
from ropecli.live.stock_transformers import quiet_transformers

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


class _Pass(NamedTuple):
    calls: list[AttentionCall]
    output: Tensor


def find_layout(model: "PreTrainedModel") -> HeadLayout:
    """How q and k rotate in every layer that sees the whole context, proved on this model's own weights.

    The model is afterwards what it was. Raises PatchError with the reason where rotating q and k in the attention
    function is not exact, and where some of the model's positions do not come by there.
    """
    calls, frequencies = _two_passes(model)
    far = [pair for pair in calls if not pair[0].slides]
    if not far:
        raise PatchError(
            "Every layer looks back sliding_window tokens and no further; other distances have no meaning there."
        )
    still = [before for before, after in far if _stands_still(before, after)]
    if still:
        raise PatchError(
            f"Of the layers that see the whole context, {len(still)} of {len(far)} do not turn by the rotary tables "
            f"({_name(still[0])} is the first): they have no positions, or others, which cannot be remapped."
        )
    return _common(far, frequencies)


def find_rotating_layers(model: "PreTrainedModel", labels: Collection[str | None]) -> tuple[HeadLayout, list[Any]]:
    """How q and k rotate by the ropes of these labels (layer types; None where all share one); and the attention
    modules that rotate, whatever they see. Layers without positions are skipped.

    The model is afterwards what it was. Raises PatchError as find_layout does, and where no layer rotates.
    """
    calls, frequencies = _two_passes(model, own_code=True)
    rotating = [
        (before, after)
        for before, after in calls
        if not _stands_still(before, after) and layer_label(before.module, frequencies) in labels
    ]
    if not rotating:
        raise PatchError(f"No layer turns by the rotary table of {', '.join(map(str, labels))}.")
    modules = {id(before.module): before.module for before, _ in rotating}  # some attend several times
    return _common(rotating, frequencies), list(modules.values())


def _two_passes(
    model: "PreTrainedModel", own_code: bool = False
) -> tuple[list[tuple["AttentionCall", "AttentionCall"]], dict[str | None, np.ndarray]]:
    """What every layer gave at the model's positions and at twice these; and the frequencies by rope label."""
    tables = rotary_tables(model)
    probe = AttentionProbe()
    attending = attending_by(model, probe, own_code)
    with torch.no_grad(), quiet_transformers(), in_evaluation(model), restored(tables), attending:
        first = _run(model, probe)
        _double(tables)
        second = _run(model, probe.replaying())
    _check_same(first, second)
    return list(zip(first.calls, second.calls, strict=True)), _frequencies(tables)


def layer_label(module: Any, labels: Collection[str | None]) -> str | None:
    """Which of the rope labels (layer types; {None} where all layers share one) this attention module rotates by.

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
        f"Layer {index} ({type(module).__name__}) does not say by which of the rotary tables it turns: its type is "
        f"{own!r}, the tables are {sorted(map(str, labels))}. A method of other distances cannot be used here."
    )


def _run(model: "PreTrainedModel", probe: AttentionProbe) -> _Pass:
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(_TOKENS, device=embeddings.weight.device)[None] % embeddings.weight.shape[0]
    try:
        output = model(input_ids=ids, use_cache=False)[0]
    except PatchError:
        raise
    except (RuntimeError, IndexError) as error:  # by a mask that has another shape than they take for granted
        raise PatchError(
            f"{type(model).__name__} does not run with another attention. Perhaps it works on the mask itself, as "
            f"sparse attention does: {reason_of(error)}"
        ) from error
    except Exception as error:  # models raise what they like
        raise PatchError(f"{type(model).__name__} does not run with another attention: {reason_of(error)}") from error
    return _Pass(probe.calls, output)


def _double(tables: list[RotaryTable]) -> None:
    """Gives every rotary module twice the positions: some do not rotate by their table, but by the same numbers."""

    def before_pass(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if "position_ids" in named:
            return arguments, {**named, "position_ids": 2 * named["position_ids"]}
        return (arguments[0], 2 * arguments[1], *arguments[2:]), named

    for module in {id(table.module): table.module for table in tables}.values():
        module.register_forward_pre_hook(before_pass, with_kwargs=True)


def _frequencies(tables: list[RotaryTable]) -> dict[str | None, np.ndarray]:
    """By rope label. Raises PatchError where two tables of one label rotate differently."""
    known: dict[str | None, np.ndarray] = {}
    for table in tables:
        if not np.array_equal(known.setdefault(table.layer_type, table.inv_freq), table.inv_freq):
            raise PatchError(f"{table.name} turns by other frequencies than another table of the same layers.")
    return known


def _check_same(first: _Pass, second: _Pass) -> None:
    """What does not come by the attention function must not know the positions."""
    if not first.calls:
        raise PatchError(
            "No layer calls an attention function of transformers' interface: the model attends by code of its own, or "
            "not at all, so that nothing can be seen or changed there."
        )
    for call in first.calls:
        if not all(one.isfinite().all() for one in (call.query, call.key, call.value)):
            raise NotFiniteError(
                f"{_name(call)} gets numbers that are not finite: there are some among the weights, or "
                f"{str(call.query.dtype).removeprefix('torch.')} cannot hold what they give."
            )
    if len(first.calls) != len(second.calls):
        raise PatchError("How often the model attends depends on the positions.")
    for before, after in zip(first.calls, second.calls, strict=True):
        if _difference(before.value, after.value) > _allowed(before.value):
            raise PatchError(f"{_name(before)}: the values go by the positions too, not the queries and keys alone.")
    if _difference(*(one.output.reshape(1, 1, 1, -1) for one in (first, second))) > _allowed(first.output):
        raise PatchError(
            "Some of the model's layers turn by the rotary tables and do not come by the attention function."
        )


def _common(pairs: list[tuple[AttentionCall, AttentionCall]], frequencies: dict[str | None, np.ndarray]) -> HeadLayout:
    """The one layout by which all these layers rotate."""
    found = [_fitting(before, after, frequencies) for before, after in pairs]
    for (before, _), layouts in zip(pairs, found, strict=True):
        if not layouts:
            raise PatchError(
                f"{_name(before)} changes queries or keys after the rotation, as a norm does, or turns them by a rule "
                "of its own: turning them further in the attention is not the same as other positions."
            )
    common = [layout for layout in found[0] if all(layout in others for others in found)]
    if not common:
        raise PatchError(f"The layers' heads do not turn alike: {list(dict.fromkeys(map(str, map(list, found))))}.")
    return min(common, key=lambda layout: max(others[layout] for others in found))


def _fitting(
    before: AttentionCall, after: AttentionCall, frequencies: dict[str | None, np.ndarray]
) -> dict[HeadLayout, float]:
    """The layouts by which a layer may rotate, and by how much each of them is off."""
    inv_freq = frequencies[layer_label(before.module, frequencies)]
    by = np.arange(before.query.shape[2], dtype=np.float64)
    starts = sorted({0, before.query.shape[3] - 2 * inv_freq.size})
    layouts = [HeadLayout(start, neighbours) for start in starts for neighbours in (False, True)]
    errors = {layout: _error(before, after, Rotation(inv_freq, *layout), by) for layout in layouts}
    return {layout: error for layout, error in errors.items() if error <= _allowed(before.query)}


def _error(before: AttentionCall, after: AttentionCall, rotation: Rotation, by: np.ndarray) -> float:
    pairs = ((before.query, after.query), (before.key, after.key))
    return max(_difference(rotation.rotate(one, by), other) for one, other in pairs)


def _stands_still(before: AttentionCall, after: AttentionCall) -> bool:
    return all(
        _difference(one, other) <= _allowed(one)
        for one, other in ((before.query, after.query), (before.key, after.key))
    )


def _difference(one: Tensor, other: Tensor) -> float:
    """The largest over the heads, relative to the head's norm. Shape of both: (batch, heads, tokens, width)."""
    norm = one.double().norm(dim=(2, 3)).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((one.double() - other.double()).norm(dim=(2, 3)) / norm).max())


def _allowed(states: Tensor) -> float:
    return _ALLOWED[states.dtype]


def _name(call: AttentionCall) -> str:
    index = getattr(call.module, "layer_idx", None)
    return type(call.module).__name__ if index is None else f"Layer {index} ({type(call.module).__name__})"
