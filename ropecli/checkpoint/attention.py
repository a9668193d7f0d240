"""The attention that transformers runs for a checkpoint whose config.json names a relative-position method.

transformers turns queries and keys as it always does; here they are turned further, to the distances of the method.
Refuses what it would do wrong in silence: packed documents, masks of another shape, padding between tokens.
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor

from ropecli.checkpoint.carrier import KEY, PREFIX, Carrier, method_of, parse_carrier
from ropecli.checkpoint.layout import layer_label
from ropecli.errors import CheckpointError, PatchError
from ropecli.remapping.attention.blocks import BlockAttention
from ropecli.remapping.attention.turning import Rotation
from ropecli.remapping.windows import sliding
from ropecli.scaling.registry import scale, scaling_methods

_UNDERSTOOD = "Take a checkpoint without it, or the model as it is."


def register() -> None:
    """Makes the methods' attention known to transformers, so that it loads what `ropecli patch` wrote."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for method in scaling_methods().values():
        if method.remaps:
            AttentionInterface.register(PREFIX + method.name, attend)
            AttentionMaskInterface.register(PREFIX + method.name, describe_rows)


@torch.compiler.disable
def describe_rows(
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
    **others: Any,
) -> Tensor:
    """What `attend` must know in place of a mask: of each row its left padding and where queries and keys begin.

    As transformers calls its mask functions. Shape (batch, 1, 1, 3), int64, on the CPU, where reading it waits for no
    other device; four dimensions, which transformers passes on as they are. Raises PatchError for a mask that is not
    causal with padding at the ends.
    """
    first = int(q_offset)
    if use_vmap:
        raise PatchError("The model overlays a mask of its own, which a relative-position method would pass over.")
    # models make the sliding layers' mask though they have no such layer, and then it may be one that hides everything
    if mask_function is not None and local_size is None:
        _refuse_other_masks(mask_function, batch_size, range(first, first + q_length), kv_offset, device)
    paddings = [0] * batch_size
    if attention_mask is not None and not _without_storage(attention_mask):
        paddings = _left_paddings(attention_mask[:, : first + q_length])
    rows = [(padding, first, kv_offset) for padding in paddings]
    described: Any = torch.tensor(rows, device="cpu")[:, None, None]
    if _without_storage(described):
        described.ropecli_rows = rows
    return described


@torch.compiler.disable  # of torch.compile, which does not follow numpy's tables: it compiles what is between
def attend(
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
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls an attention function.

    query: shape (batch, heads, queries, head_dim); key, value: shape (batch, kv heads, keys, ...). attention_mask: of
    describe_rows. sliding_window: tokens; such a layer is left as it is. position_ids: shape (batch, queries). Returns
    shape (batch, queries, heads, width). Raises PatchError for positions that leave some out, or begin again.
    """
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise PatchError("A layer attends in both directions, where a relative-position method has no meaning.")
    kernel = _kernel(module, sliding_window, query.shape[-1])
    options = {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout": dropout,
    }
    rows = _rows(attention_mask)
    _refuse_other_positions(position_ids, rows, query.shape[2])
    if len(set(rows)) == 1:
        return _attend_alike(kernel, rows[0], query, key, value, options).transpose(1, 2).contiguous(), None
    output = query.new_zeros(*query.shape[:-1], value.shape[-1])
    for row in dict.fromkeys(rows):
        alike = torch.tensor([index for index, one in enumerate(rows) if one == row], device=query.device)
        own = _attend_alike(kernel, row, query[alike], key[alike], value[alike], options)
        output = output.index_copy(0, alike, own)
    return output.transpose(1, 2).contiguous(), None


def _attend_alike(
    kernel: BlockAttention,
    row: tuple[int, int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Rows of the same padding: what is padding is cut off, and positions count from the first token on."""
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


def _rows(described: Any) -> list[tuple[int, int, int]]:
    if described is None:
        raise PatchError(f"The model gives its attention no mask, so that padding would be read. {_UNDERSTOOD}")
    if (known := getattr(described, "ropecli_rows", None)) is not None:
        return known
    if described.dtype != torch.int64 or described.shape[1:] != (1, 1, 3):
        raise PatchError(
            f"The model gives its attention a mask of shape {tuple(described.shape)}; a relative-position method takes "
            "none but the causal one with padding, which transformers makes from a mask of shape (batch, tokens)."
        )
    return [tuple(row) for row in described[:, 0, 0].tolist()]


def _left_paddings(mask: Tensor) -> list[int]:
    """mask: shape (batch, tokens), true for tokens. Raises PatchError for padding between tokens."""
    tokens = mask.shape[1]
    real = mask.to(torch.int64)
    first = torch.where(mask, torch.arange(tokens, device=mask.device), tokens).amin(1)
    last = torch.where(mask, torch.arange(tokens, device=mask.device), -1).amax(1)
    if bool((real.sum(1) != (last - first + 1).clamp_min(0)).any()):
        raise PatchError(
            "The attention mask has padding between tokens; a relative-position method takes it at the ends alone."
        )
    return first.tolist()


def _refuse_other_masks(
    mask_function: Callable[..., Any], batch: int, places: range, first_key: int, device: torch.device | str
) -> None:
    """A token sees the one before it and not the one after it, in plain and in sliding attention.

    places: the queries'.
    """
    at = torch.arange(places.start, places.stop, device=device)[None]
    if _without_storage(at):
        return
    row, head = torch.arange(batch, device=device)[:, None], at.new_zeros(1, 1)
    before = at[:, max(0, first_key + 1 - places.start) :]
    if not bool(torch.as_tensor(mask_function(row, head, before, before - 1)).all()):
        raise PatchError(
            "Tokens do not see the ones before them: documents are packed into one sequence, or the model attends in "
            "chunks. A relative-position method reads one document per row."
        )
    if bool(torch.as_tensor(mask_function(row, head, at[:, :-1], at[:, 1:])).any()):
        raise PatchError("Tokens see the ones after them, which a relative-position method would not let them.")


def _refuse_other_positions(position_ids: Tensor | None, rows: list[tuple[int, int, int]], queries: int) -> None:
    """Every token is one position after the one before; padding may be anywhere, and all of it at one place.

    What all layers are given is looked at once.
    """
    if position_ids is None or queries == 1 or position_ids.shape[1:] != (queries,) or _without_storage(position_ids):
        return
    if any(known() is position_ids and of == rows for known, of in _KNOWN_POSITIONS):
        return
    steps = position_ids.diff(dim=1).expand(len(rows), -1)
    index = torch.arange(1, queries, device=steps.device)
    begins = torch.tensor([padding - first for padding, first, _ in rows], device=steps.device)[:, None]
    odd = (steps != 1) & (index > begins)
    # from the first such step on, what is at one place is padding at the end
    ended = odd.cumsum(1) > 0
    if bool((ended & (steps != 0) & (ended.cumsum(1) > 1)).any()):
        raise PatchError(
            "The positions leave some out or begin again, as where documents are packed into one row; a "
            "relative-position method counts the tokens of a row one by one. Give each document a row, and no "
            "position_ids."
        )
    _KNOWN_POSITIONS.append((ref(position_ids), rows))


_KNOWN_POSITIONS: deque[tuple[ref[Tensor], list[tuple[int, int, int]]]] = deque(maxlen=4)


def _without_storage(tensor: Any) -> bool:
    """Such tensors follow a computation's shapes alone; nothing is known of their values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or (isinstance(tensor, Tensor) and tensor.is_meta)


_KERNELS: "WeakKeyDictionary[torch.nn.Module, tuple[Any, Any, int | None, BlockAttention]]" = WeakKeyDictionary()


def _kernel(module: torch.nn.Module, sliding_window: int | None, head_dim: int) -> BlockAttention:
    """The attention of a layer; layers that turn alike share one, with its tables."""
    config: Any = module.config
    block, name = getattr(config, KEY, None), config._attn_implementation
    known = _KERNELS.get(module)
    if known is not None and known[0] is block and known[1] == name and known[2] == sliding_window:
        return known[3]
    kernel = _sliding(sliding_window) if sliding_window is not None else _make_kernel(module, block, name, head_dim)
    _KERNELS[module] = (block, name, sliding_window, kernel)
    return kernel


def _make_kernel(module: torch.nn.Module, block: Any, name: str, head_dim: int | None = None) -> BlockAttention:
    """head_dim: what has to be wide enough for what turns; None where it was looked at before."""
    method = method_of(name)
    if method is None or block is None:
        raise CheckpointError(
            f"The attention {name} was asked for, and config.json has no {KEY} that says with which parameters. "
            "Write the checkpoint with `ropecli patch`."
        )
    carrier = parse_carrier(block, method)
    if carrier.rotary_start is None or carrier.neighbours is None:
        raise CheckpointError(
            f"{KEY} in config.json does not say which dimensions of a head turn. Write the patch anew from the "
            "original checkpoint."
        )
    inv_freq = carrier.inv_freq or frequencies_of(module.config)
    label = layer_label(module, {name or None for name in inv_freq})
    numbers = np.asarray(inv_freq[label or ""], dtype=np.float64)
    if head_dim is not None and (stop := carrier.rotary_start + 2 * len(numbers)) > head_dim:
        raise CheckpointError(
            f"{KEY} in config.json has dimensions {carrier.rotary_start} to {stop - 1} of a head turn, which is "
            f"{head_dim} wide. Write the patch anew from the original checkpoint."
        )
    parameters = tuple(sorted(carrier.params.items()))
    windows = (carrier.pretrained, carrier.target)
    return _shared(method, parameters, windows, numbers.tobytes(), carrier.rotary_start, carrier.neighbours)


@lru_cache(maxsize=16)
def _shared(
    method: str, params: tuple[tuple[str, Any], ...], windows: tuple[int, int], inv_freq: bytes, start: int, pairs: bool
) -> BlockAttention:
    remapping = Carrier(method, dict(params), *windows).remapping()
    return BlockAttention(remapping, Rotation(np.frombuffer(inv_freq), start, pairs))


@lru_cache(maxsize=16)
def _sliding(window: int) -> BlockAttention:
    return BlockAttention(sliding(window), None)


def frequencies_of(config: Any) -> dict[str, list[float]]:
    """The frequencies by layer type ("" for all) that a config object's RoPE fields stand for, radians per token."""
    from ropecli.checkpoint.dialects import read_settings

    ropes = read_settings(config.to_dict()).ropes
    return {one.geometry.layer_type or "": scale(one.geometry, one.spec).inv_freq.tolist() for one in ropes}
