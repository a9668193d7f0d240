"""The attention and mask functions that transformers runs for checkpoints patched with a distance method.

transformers rotates queries and keys as usual; the attention function rotates them further, to the method's distances.
The mask function passes the left padding of each row instead of a mask. Cases that would give wrong results silently
are refused: dropout, packed documents, other masks, padding between tokens.
"""

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ropecli.attention.block_attention import BlockAttention, Rotation
from ropecli.attention.head_layout import layer_label
from ropecli.config.saved_remapping import KEY, PREFIX, SavedRemapping, method_of, parse_saved_remapping
from ropecli.config.settings import read_settings
from ropecli.errors import CheckpointError, PatchError
from ropecli.remapping.first_and_last import sliding
from ropecli.scaling.registry import scaling_methods


def register() -> None:
    """Register the methods' attention with transformers, so that it loads checkpoints patched with them."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for method in scaling_methods().values():
        if method.remaps:
            AttentionInterface.register(PREFIX + method.name, remapped_attention)
            AttentionMaskInterface.register(PREFIX + method.name, describe_padding)


@torch.compiler.disable  # torch.compile cannot trace the numpy tables; it compiles the rest of the model
def remapped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers' AttentionInterface.

    query: shape (batch, heads, queries, head_dim); key, value: shape (batch, kv heads, keys, ...). attention_mask: from
    describe_padding. sliding_window: tokens; layers with a sliding window attend as usual. position_ids: shape (batch,
    queries). Returns shape (batch, queries, heads, width). Raises PatchError for dropout, and for positions that skip
    or restart.
    """
    if dropout:
        raise PatchError(
            f"attention_dropout is {dropout:g}; distance methods do not support dropout. Set attention_dropout to 0 in "
            "config.json."
        )
    kernel = _kernel(module, sliding_window)
    options = {"scaling": query.shape[-1] ** -0.5 if scaling is None else scaling, "softcap": softcap, "sinks": s_aux}
    rows = read_padding(attention_mask)
    refuse_other_positions(position_ids, rows, query.shape[2])
    if len(set(rows)) == 1:
        output = _attend_same_padding(kernel, rows[0], query, key, value, options)
    else:
        output = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for row in dict.fromkeys(rows):
            same = torch.tensor([index for index, padded in enumerate(rows) if padded == row], device=query.device)
            attended = _attend_same_padding(kernel, row, query[same], key[same], value[same], options)
            output = output.index_copy(0, same, attended)
    return output.transpose(1, 2).contiguous(), None


def _attend_same_padding(
    kernel: BlockAttention, row: "RowPadding", query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attend in rows with equal padding: cut off the padding and count positions from the first token."""
    padding, first_query, first_key = row
    padded = min(max(padding - first_query, 0), query.shape[2])
    low, high = max(padding - first_key, 0), first_query + query.shape[2] - first_key  # a static cache is longer
    if padded == query.shape[2]:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    result = kernel(
        query[:, :, padded:],
        key[:, :, low:high],
        value[:, :, low:high],
        first_query=first_query + padded - padding,
        first_key=first_key + low - padding,
        **options,
    )
    return torch.nn.functional.pad(result, (0, 0, padded, 0)) if padded else result


_KERNELS: "WeakKeyDictionary[torch.nn.Module, tuple[Any, BlockAttention]]" = WeakKeyDictionary()


def _kernel(module: torch.nn.Module, sliding_window: int | None) -> BlockAttention:
    """The cached attention of a layer, rebuilt if the model was patched since."""
    config: Any = module.config
    block = getattr(config, KEY, None)
    if module not in _KERNELS or _KERNELS[module][0] is not block:
        _KERNELS[module] = (block, make_kernel(module, config._attn_implementation, sliding_window))
    return _KERNELS[module][1]


def make_kernel(module: torch.nn.Module, name: str, sliding_window: int | None) -> BlockAttention:
    """Build the attention of a layer. name: the attention in its config. sliding_window: tokens; None for no window.

    Raises CheckpointError if the config does not describe the method.
    """
    if sliding_window is not None:
        return _sliding(sliding_window)
    saved = parse_saved_remapping(getattr(module.config, KEY, None), method_of(name) or name)
    inv_freq = saved.inv_freq or frequencies_of(module.config)
    label = layer_label(module, {layer_type or None for layer_type in inv_freq})
    return _shared(json.dumps(saved.as_json(), sort_keys=True), tuple(inv_freq[label or ""]))


@lru_cache(maxsize=16)
def _shared(saved_as_json: str, inv_freq: tuple[float, ...]) -> BlockAttention:
    """Build one attention for all layers with the same settings, so that they share its tables."""
    saved = SavedRemapping(**json.loads(saved_as_json))
    if saved.rotary_start is None or saved.neighbours is None:
        raise CheckpointError(f"{KEY} in config.json lacks the layout of heads. Patch the original checkpoint again.")
    return BlockAttention(saved.remapping(), Rotation(np.array(inv_freq), saved.rotary_start, saved.neighbours))


@lru_cache(maxsize=16)
def _sliding(window: int) -> BlockAttention:
    return BlockAttention(sliding(window), None)


def frequencies_of(config: Any) -> dict[str, list[float]]:
    """Frequencies by layer type ("" for all) from a config object's RoPE fields, radians per token."""
    ropes = read_settings(config.to_dict()).scaled()
    return {label or "": rope.inv_freq.tolist() for label, rope in ropes.items()}


class RowPadding(NamedTuple):
    """padding: number of padding tokens on the left. query, key: index of the first query and first key of a pass."""

    padding: int
    query: int
    key: int


@torch.compiler.disable
def describe_padding(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> Tensor:
    """Mask function for transformers' AttentionMaskInterface that returns each row's padding instead of a mask.

    Returns shape (batch, 1, 1, 3), int64: transformers passes on masks of four dimensions unchanged. It is on the CPU,
    so that reading it does not wait for the device. Raises PatchError if the mask is not causal with padding at the
    ends.
    """
    first = int(q_offset)
    if use_vmap:
        raise PatchError("The model adds its own attention mask, which distance methods do not support.")
    # models also build the mask of sliding layers if they have none; it may hide everything
    if mask_function is not None and local_size is None:
        _refuse_other_masks(mask_function, batch_size, range(first, first + q_length), kv_offset, device)
    paddings = [0] * batch_size if attention_mask is None else _left_paddings(attention_mask, first + q_length)
    rows = [RowPadding(padding, first, kv_offset) for padding in paddings]
    return torch.tensor(rows, device="cpu")[:, None, None]


def read_padding(described: Tensor | None) -> list[RowPadding]:
    """Read the rows that describe_padding returned instead of a mask. Raises PatchError for any other mask."""
    if described is None or described.dtype != torch.int64 or described.shape[1:] != (1, 1, 3):
        received = "no mask" if described is None else f"a mask of shape {tuple(described.shape)}"
        raise PatchError(
            f"The attention received {received}; distance methods require the causal mask that transformers makes from "
            "a padding mask of shape (batch, tokens)."
        )
    return [RowPadding(*row) for row in described[:, 0, 0].tolist()]


def _left_paddings(mask: Tensor, tokens: int) -> list[int]:
    """Left padding of each row. mask: shape (batch, tokens or more), true for tokens. Raises PatchError."""
    if mask.shape[1] < tokens:
        raise PatchError(f"The attention mask has {mask.shape[1]} tokens; expected {tokens}, with those in the cache.")
    mask = mask[:, :tokens].to(torch.int64)
    first, last = mask.argmax(1), tokens - 1 - mask.flip(1).argmax(1)
    counts = mask.sum(1)
    if bool(((counts != last - first + 1) & (counts > 0)).any()):
        raise PatchError("The attention mask has padding between tokens; distance methods support it only at the ends.")
    return torch.where(counts > 0, first, tokens).tolist()


def _refuse_other_masks(
    mask_function: Callable[..., Any], batch: int, places: range, first_key: int, device: torch.device | str
) -> None:
    """Refuse masks in which a token does not see the one before it or sees the one after it. places: of the queries."""
    at = torch.arange(places.start, places.stop, device=device)[None]
    row, head = torch.arange(batch, device=device)[:, None], at.new_zeros(1, 1)
    before = at[:, max(0, first_key + 1 - places.start) :]
    sees_before = torch.as_tensor(mask_function(row, head, before, before - 1)).all()
    sees_after = torch.as_tensor(mask_function(row, head, at[:, :-1], at[:, 1:])).any()
    if not sees_before or sees_after:
        raise PatchError(
            "The attention mask is not causal, or hides preceding tokens: documents are packed into one row, or the "
            "model attends in chunks. Distance methods require one document per row."
        )


def refuse_other_positions(position_ids: Tensor | None, rows: list[RowPadding], queries: int) -> None:
    """Raise PatchError unless the positions of tokens are consecutive. Padding may have any position."""
    if position_ids is None or queries == 1 or position_ids.shape[1:] != (queries,):
        return
    steps = position_ids.diff(dim=1).expand(len(rows), -1)
    index = torch.arange(1, queries, device=steps.device)
    begins = torch.tensor([padding - first for padding, first, _ in rows], device=steps.device)[:, None]
    odd = (steps != 1) & (index > begins)
    # from the first such step on, constant positions are padding at the end
    ended = odd.cumsum(1) > 0
    if bool((ended & (steps != 0) & (ended.cumsum(1) > 1)).any()):
        raise PatchError(
            "position_ids are not consecutive, as with packed documents; distance methods require consecutive "
            "positions. Put one document in each row and omit position_ids."
        )
