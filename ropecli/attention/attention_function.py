"""The attention function that transformers runs for checkpoints patched with a distance method.

transformers rotates queries and keys as usual; this function rotates them further, to the method's distances. Cases
that would give wrong results silently are refused here and in row_padding.py.
"""

import json
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ropecli.attention.block_attention import BlockAttention
from ropecli.attention.head_layout import layer_label
from ropecli.attention.rotation import RotatedKeys, Rotation
from ropecli.attention.row_padding import RowPadding, describe_padding, read_padding, refuse_other_positions
from ropecli.config.saved_remapping import KEY, PREFIX, SavedRemapping, method_of, parse_saved_remapping
from ropecli.errors import CheckpointError, PatchError
from ropecli.remapping.branches import sliding
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.scale import scale


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
    earlier = _ROTATED.pop(module, {})  # removed while in use, so that no other thread writes to them
    kept = {row.padding: earlier.get(row.padding) for row in rows}
    if len(set(rows)) == 1:
        output = _attend_alike(kernel, rows[0], query, key, value, options, kept)
    else:
        output = query.new_zeros(*query.shape[:-1], value.shape[-1])
        for row in dict.fromkeys(rows):
            alike = torch.tensor([index for index, padded in enumerate(rows) if padded == row], device=query.device)
            attended = _attend_alike(kernel, row, query[alike], key[alike], value[alike], options, kept)
            output = output.index_copy(0, alike, attended)
    _ROTATED[module] = kept
    return output.transpose(1, 2).contiguous(), None


def _attend_alike(
    kernel: BlockAttention,
    row: RowPadding,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
    kept: dict[int, RotatedKeys | None],
) -> Tensor:
    """Attend in rows with equal padding: cut off the padding and count positions from the first token.

    kept: the rotated keys of earlier passes by padding; None for a pass without a KV cache.
    """
    padding, first_query, first_key = row
    padded = min(max(padding - first_query, 0), query.shape[2])
    low, high = max(padding - first_key, 0), first_query + query.shape[2] - first_key  # a static cache is longer
    if padded == query.shape[2]:
        return query.new_zeros(*query.shape[:-1], value.shape[-1])
    query, key, value = query[:, :, padded:], key[:, :, low:high], value[:, :, low:high]
    kept[padding] = (kept[padding] or RotatedKeys()) if _reads_cache(query, key) else None
    result = kernel(
        query,
        key,
        value,
        first_query=first_query + padded - padding,
        first_key=first_key + low - padding,
        kept=kept[padding],
        **options,
    )
    return torch.nn.functional.pad(result, (0, 0, padded, 0)) if padded else result


_ROTATED: "WeakKeyDictionary[torch.nn.Module, dict[int, RotatedKeys | None]]" = WeakKeyDictionary()


def _reads_cache(query: Tensor, key: Tensor) -> bool:
    """Return whether to keep the rotated keys for the next pass: when generating with a KV cache on a CPU.

    On a GPU they are rotated again: kept keys need half as much memory as the KV cache, in bfloat16 as much again.
    """
    cached = key.shape[2] > query.shape[2] and not torch.is_grad_enabled()
    return cached and key.device.type == "cpu" and RotatedKeys.suits(key)


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
        raise CheckpointError(
            f"{KEY} in config.json lacks the layout of the rotary dimensions. Patch the original checkpoint again."
        )
    return BlockAttention(saved.remapping(), Rotation(np.array(inv_freq), saved.rotary_start, saved.neighbours))


@lru_cache(maxsize=16)
def _sliding(window: int) -> BlockAttention:
    return BlockAttention(sliding(window), None)


def frequencies_of(config: Any) -> dict[str, list[float]]:
    """Frequencies by layer type ("" for all) from a config object's RoPE fields, radians per token."""
    from ropecli.config.settings import read_settings

    ropes = read_settings(config.to_dict()).ropes
    scaled = (scale(rope.geometry, rope.spec.checked()) for rope in ropes)
    return {rope.geometry.layer_type or "": rope.inv_freq.tolist() for rope in scaled}
