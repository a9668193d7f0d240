"""Find which dimensions of a head rotate, in which pairs, and prove that the attention can rotate them further.

The proof runs two passes over the same tokens, the second at twice the positions. Queries and keys must differ by
exactly one more rotation by the positions. For these passes, an attention function and a mask function for
transformers' interfaces replace the model's own and record their arguments. Every token attends to itself alone, so
that every layer sees the same hidden states in both, and any other effect of the positions changes the model's output.
Source of the rotation: Su et al. 2021 (arXiv:2104.09864), section 3.2.2.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ropecli.attention.block_attention import Rotation
from ropecli.errors import NotFiniteError, PatchError, reason_of
from ropecli.live.devices import probe_ids
from ropecli.live.rotary import RotaryTable, modules_of, on_positions, rotary_tables, unpatched_after
from ropecli.live.stock_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_TOKENS = 24
ALLOWED = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Differences relative to a head's norm. Rounding gives about 1e-7 (float32), 5e-4 (float16), 4e-3 (bfloat16); a wrong
layout, 0.5."""

_NAME = "ropecli:layout"
# arguments that do not change the attention or that the methods support
_UNDERSTOOD = {
    *("dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "cache_position"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache", "deterministic"),
}


class HeadLayout(NamedTuple):
    """The layout of the rotary dimensions of a head: `start` and `neighbours` of Rotation."""

    rotary_start: int
    neighbours: bool


class AttentionCall(NamedTuple):
    """The arguments of one call of the attention function; query, key, value: shape (batch, heads, tokens, width)."""

    module: Any
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    slides: bool

    @property
    def name(self) -> str:
        index, name = getattr(self.module, "layer_idx", None), type(self.module).__name__
        return name if index is None else f"Layer {index} ({name})"


class AttentionRecorder:
    """An attention function that records its calls, while every token attends to itself alone, and a mask function."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def mask(self, *, batch_size: int, mask_function: Any = None, **unused: Any) -> Tensor | None:
        """The mask function."""
        return None

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """The attention function. Errors: those of `check`."""
        from transformers.integrations.sdpa_attention import repeat_kv

        self.check(type(module).__name__, attention_mask, arguments)
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        slides = arguments.get("sliding_window") is not None
        self.calls.append(AttentionCall(module, query.clone(), key.clone(), value.clone(), scaling, slides))
        return repeat_kv(value, query.shape[1] // value.shape[1]).transpose(1, 2).contiguous(), None

    def check(self, name: str, mask: Any, arguments: dict[str, Any]) -> None:
        """Called before each call is recorded. name: the module, for messages. mask, arguments: of the call."""

    def taken(self) -> list[AttentionCall]:
        """The calls. Forgets them."""
        calls, self.calls = self.calls, []
        return calls


class _CausalRecorder(AttentionRecorder):
    """Refuses everything other than standard causal attention."""

    def mask(self, *, batch_size: int, mask_function: Any = None, **unused: Any) -> Tensor:
        """The mask function. Each mask holds only whether it is exactly causal, 1 or 0."""
        from transformers.masking_utils import causal_mask_function

        return torch.full((batch_size, 1, 1, 3), int(mask_function is causal_mask_function))

    def check(self, name: str, mask: Any, arguments: dict[str, Any]) -> None:
        """Raises PatchError."""
        unknown = sorted(key for key, value in arguments.items() if value is not None and key not in _UNDERSTOOD)
        if unknown:
            raise PatchError(f"{name} passes unsupported arguments to its attention: {unknown}.")
        if mask is None or mask.dtype != torch.int64 or mask.shape[1:] != (1, 1, 3) or mask.unique().numel() != 1:
            raise PatchError(f"{name} changes the attention mask, as sparse attention does; it is not supported.")
        if (arguments.get("sliding_window") is not None) == bool(mask.flatten()[0]):
            raise PatchError(f"{name} has either a sliding_window or a mask that hides part of the context, not both.")


@contextlib.contextmanager
def attending_by(model: "PreTrainedModel", recorder: AttentionRecorder) -> Iterator[None]:
    """Run the model with this attention, in evaluation mode and without gradients; restore it at the end."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, recorder)
    AttentionMaskInterface.register(_NAME, recorder.mask)
    try:
        with torch.no_grad(), quiet_transformers(), in_evaluation(model), unpatched_after(model):
            model.set_attn_implementation(_NAME)
            yield
    finally:
        # the interface has no public way to unregister
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME)


@contextlib.contextmanager
def in_evaluation(model: torch.nn.Module) -> Iterator[None]:
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was in training:
            module.training = was


_Layer = tuple[AttentionCall, AttentionCall]
"""A layer's attention call at the model's positions, and at twice the positions."""


def find_layout(model: "PreTrainedModel") -> HeadLayout:
    """Find the layout of q and k in every layer with full attention, and prove it on this model's weights.

    Restores the model. Raises PatchError if rotating q and k in the attention function is not exact, or if positions
    have other effects.
    """
    far = [(before, after) for before, after in _see_layers(model) if not before.slides]
    if not far:
        raise PatchError("All layers have a sliding window, so distance methods have no effect on this model.")
    still = [before.name for before, after in far if _are_equal((before.query, before.key), after)]
    if still:
        raise PatchError(
            f"{len(still)} of {len(far)} layers with full attention do not rotate by the rotary tables (the first is "
            f"{still[0]}). Their positions cannot be remapped."
        )
    return _common_layout(far, {table.layer_type: table.inv_freq for table in rotary_tables(model)})


def layer_label(module: Any, labels: Collection[str | None]) -> str | None:
    """Return the rope label of an attention module: its layer type; None if all layers share one rope.

    Raises PatchError if its layer type is not one of the labels.
    """
    if set(labels) == {None}:
        return None
    types = getattr(getattr(module, "config", None), "layer_types", None) or []
    index, layer_type = getattr(module, "layer_idx", None), getattr(module, "layer_type", None)
    for label in (layer_type, types[index] if index is not None and index < len(types) else None):
        if label in labels:
            return label
    raise PatchError(
        f"Cannot find the rotary table of layer {index} ({type(module).__name__}): its type is {layer_type!r}, not "
        f"one of {sorted(map(str, labels))}."
    )


def _see_layers(model: "PreTrainedModel") -> list[_Layer]:
    """Run the two passes. Raises PatchError if anything other than queries and keys depends on positions."""
    recorder = _CausalRecorder()
    with attending_by(model, recorder):
        output, first = _run(model), recorder.taken()
        if not first:
            raise PatchError(
                "No layer uses transformers' attention interface: the model has its own attention code, which cannot "
                "be replaced."
            )
        change_positions(rotary_tables(model), lambda positions: 2 * positions)
        output_of_second, second = _run(model), recorder.taken()
    layers = list(zip(first, second, strict=True))
    for before, after in layers:
        if not all(states.isfinite().all() for states in (before.query, before.key, before.value)):
            raise NotFiniteError(
                f"{before.name} has queries, keys or values that are not finite: some weights are not finite, or "
                f"{str(before.query.dtype).removeprefix('torch.')} overflows."
            )
        if difference(before.value, after.value) > ALLOWED[before.value.dtype]:
            raise PatchError(f"{before.name}: the values depend on the positions, not only queries and keys.")
    if difference(*(logits.reshape(1, 1, 1, -1) for logits in (output, output_of_second))) > ALLOWED[output.dtype]:
        raise PatchError("Some layers use the rotary tables without calling the attention function.")
    return layers


def _run(model: "PreTrainedModel") -> Tensor:
    try:
        return model(input_ids=probe_ids(model, _TOKENS), use_cache=False)[0]
    except Exception as error:  # of the recorder; models raise many kinds
        raise PatchError(
            f"{type(model).__name__} does not run with another attention function, perhaps because it uses the mask "
            f"itself, as sparse attention does: {reason_of(error)}"
        ) from error


def change_positions(tables: list[RotaryTable], change: Callable[[Tensor], Tensor]) -> None:
    """Change the positions that rotary modules receive. Changing the tables would miss modules that ignore them."""
    for module in modules_of(tables):
        on_positions(module, change)


def _common_layout(layers: list[_Layer], frequencies: dict[str | None, np.ndarray]) -> HeadLayout:
    """Return the layout that fits all layers. Raises PatchError if there is none."""
    width = layers[0][0].query.shape[3]
    starts = sorted({0, *(width - 2 * inv_freq.size for inv_freq in frequencies.values())})
    layouts = [HeadLayout(start, neighbours) for start in starts for neighbours in (False, True)]
    for before, after in layers:
        inv_freq = frequencies[layer_label(before.module, frequencies)]
        layouts = [layout for layout in layouts if _rotates_by(before, after, inv_freq, layout)]
        if not layouts:
            raise PatchError(
                f"{before.name} changes queries or keys after the rotation (a norm, for example) or rotates them "
                "in an unknown way, so rotating them further in the attention is not exact."
            )
    return layouts[0]


def _rotates_by(before: AttentionCall, after: AttentionCall, inv_freq: np.ndarray, layout: HeadLayout) -> bool:
    """Return whether doubling the positions equals one more rotation by the positions in this layout."""
    tokens, width = before.query.shape[2:]
    if not 0 <= layout.rotary_start <= width - 2 * inv_freq.size:
        return False
    rotation, by = Rotation(inv_freq, *layout), np.arange(tokens)
    return _are_equal([rotation.rotate(states, by) for states in (before.query, before.key)], after)


def _are_equal(query_and_key: Iterable[Tensor], call: AttentionCall) -> bool:
    """Return whether these are the queries and keys of the call, up to rounding."""
    pairs = zip(query_and_key, (call.query, call.key), strict=True)
    return all(difference(first, second) <= ALLOWED[first.dtype] for first, second in pairs)


def difference(first: Tensor, second: Tensor) -> float:
    """Largest difference of a head, relative to its norm in `first`. Shapes: (batch, heads, tokens, width)."""
    first, second = first.cpu().double(), second.cpu().double()  # MPS has no float64
    norm = first.norm(dim=(2, 3)).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((first - second).norm(dim=(2, 3)) / norm).max())
