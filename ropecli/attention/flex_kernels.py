"""Attention at remapped distances on a GPU: one fused kernel per branch, whose results are merged by log-sum-exps.

Sources: Dong et al. 2024, FlexAttention (arXiv:2412.05496); for merging, Dao et al. 2022 (arXiv:2205.14135), section
3.1.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ropecli.attention.block_loop import KeyRange, find_ranges
from ropecli.rope import Remapping

_BLOCK = 128  # queries, or keys, of a block of the mask
_SMALLEST_HEAD, _LARGEST_HEAD = 16, 256
"""Head dimensions of the kernels. Larger heads do not fit into the shared memory of every GPU."""


def suits_flex(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the fused kernels support the call and have enough queries to be worthwhile."""
    return (
        type(query) is Tensor  # not a fake tensor, for which no kernel can be compiled
        and query.is_cuda
        and query.shape[2] >= _BLOCK
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        # the kernels require a common dtype, which autocast provides
        and (query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled("cuda"))
        and min(query.shape[-1], value.shape[-1]) >= _SMALLEST_HEAD
        and max(query.shape[-1], value.shape[-1]) <= _LARGEST_HEAD
        and not torch._dynamo.config.disable  # without a compiler flex_attention allocates n × n matrices
    )


def attend_by_flex(
    rotated: Iterable[tuple[Tensor, Tensor]],
    value: Tensor,
    masks: Sequence[BlockMask],
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend with fused kernels. rotated: queries and keys of each branch. Other arguments: see BlockAttention."""
    kernel: Any = _compiled_flex() if value.is_cuda else flex_attention  # on a CPU only in tests
    options: dict[str, Any] = {"scale": scaling, "return_aux": AuxRequest(lse=True)}
    if softcap:
        options["score_mod"] = lambda score, batch, head, query, key: softcap * torch.tanh(score / softcap)
    outputs, log_sums = [], []
    for (query, key), mask in zip(rotated, masks, strict=True):
        grouped = query.shape[1] != key.shape[1]
        output, auxiliary = kernel(query, key, value, block_mask=mask, enable_gqa=grouped, **options)
        outputs.append(output)
        log_sums.append(auxiliary.lse)
    return _merge(outputs, log_sums, sinks).to(value.dtype)


def make_block_masks(
    remapping: Remapping, first_query: int, queries: int, first_key: int, keys: int, device: torch.device
) -> list[BlockMask]:
    """The masks of all branches in which any query sees a key. queries, keys: the number of each."""
    ranges = find_ranges(remapping, first_query, queries, first_key, keys)
    with torch.inference_mode(False):  # cached masks may be used in training later
        return [_make_block_mask(keys_of_branch, keys, device) for keys_of_branch in ranges]


def _make_block_mask(keys_of_branch: KeyRange, keys: int, device: torch.device) -> BlockMask:
    """The key blocks that the kernel visits for each query block: fully visible ones, and ones to mask key by key.

    create_block_mask would allocate a matrix of queries × keys.
    """
    first_key, stop_key, queries = keys_of_branch.first, keys_of_branch.stop, len(keys_of_branch.first)
    # rows of `seen` and `full` are blocks of queries, columns blocks of keys
    first_query = np.arange(0, queries, _BLOCK)
    last_query = np.minimum(first_query + _BLOCK, queries) - 1
    begin = np.arange(0, keys, _BLOCK)
    end = np.minimum(begin + _BLOCK, keys)
    # first_key and stop_key ascend: the first query of a block sees the earliest keys, the last one the latest
    seen = (end > first_key[first_query][:, None]) & (begin < stop_key[last_query][:, None])
    full = (begin >= first_key[last_query][:, None]) & (end <= stop_key[first_query][:, None])
    full &= (end - begin == _BLOCK) & (last_query - first_query == _BLOCK - 1)[:, None]  # as PyTorch's own block masks
    first, stop = (torch.tensor(bound, device=device) for bound in (first_key, stop_key))

    def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key < stop[query])

    return BlockMask.from_kv_blocks(
        *_block_lists(seen & ~full, device),
        *_block_lists(full, device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=inside,
        seq_lengths=(queries, keys),
    )


def _block_lists(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number of chosen key blocks for each query block, and the block indices, chosen first. Shapes: (1, 1, ...)."""
    number, order = chosen.sum(1), np.argsort(~chosen, axis=1, kind="stable")
    counts, indices = (torch.tensor(rows, dtype=torch.int32, device=device)[None, None] for rows in (number, order))
    return counts, indices


def _merge(outputs: Sequence[Tensor], log_sums: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
    """Average the outputs of the branches, weighted by the sums of their exponentiated scores.

    outputs: shape (batch, heads, queries, width) each. log_sums: log-sum-exps of the scores, shape (batch, heads,
    queries) each; -inf for a query that sees no key. sinks: shape (heads,).
    """
    logs = torch.stack(tuple(log_sums)).float()
    largest = logs.detach().amax(0)  # subtracted below, so that exp does not overflow
    if sinks is not None:
        largest = torch.maximum(largest, sinks.detach()[:, None])
    weights = torch.exp(logs - largest.masked_fill(largest.isneginf(), 0.0))
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks.float()[:, None] - largest)
    weights = weights / total.masked_fill(total == 0, 1.0)
    merged = [weight[..., None] * output.float() for weight, output in zip(weights, outputs, strict=True)]
    return torch.stack(merged).sum(0)


@cache
def _compiled_flex() -> Callable[..., Any]:
    # fullgraph raises if compilation fails; the fallback, uncompiled flex_attention, allocates n × n matrices
    return torch.compile(flex_attention, fullgraph=True)
