"""Attention at remapped distances on a GPU: one fused kernel per branch, merged by their log-sum-exps.

Source: Dong et al. 2024, FlexAttention (arXiv:2412.05496); of the merging, Dao et al. 2022 (arXiv:2205.14135),
section 3.1.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ropecli.attention.key_ranges import KeyRange, find_ranges
from ropecli.rope import Remapping

_BLOCK = 128
_SMALLEST_HEAD, _LARGEST_HEAD = 16, 256
"""Head dimensions of the kernels: wider heads do not fit into every GPU's shared memory."""


def suits_flex(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the fused kernels have what the call needs, and queries enough to fill them."""
    return (
        type(query) is Tensor  # none without storage: a kernel could not be made for it
        and query.is_cuda
        and query.shape[2] >= _BLOCK
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        # they take one dtype, to which autocast brings all
        and (query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled("cuda"))
        and min(query.shape[-1], value.shape[-1]) >= _SMALLEST_HEAD
        and max(query.shape[-1], value.shape[-1]) <= _LARGEST_HEAD
        and not torch._dynamo.config.disable  # without a compiler flex_attention fills n × n matrices
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
    """Attention with BlockAttention's arguments. rotated: queries and keys of each branch. masks: of each branch."""
    kernel: Any = _compiled() if value.is_cuda else flex_attention
    options: dict[str, Any] = {"scale": scaling, "return_aux": AuxRequest(lse=True)}
    if softcap:
        options["score_mod"] = _capped(softcap)
    outputs, sums = [], []
    for (query, key), mask in zip(rotated, masks, strict=True):
        grouped = query.shape[1] != key.shape[1]
        output, more = kernel(query, key, value, block_mask=mask, enable_gqa=grouped, **options)
        outputs.append(output)
        sums.append(more.lse)
    return _merge(outputs, sums, sinks).to(value.dtype)


def make_block_masks(
    remapping: Remapping, first_query: int, queries: int, first_key: int, keys: int, device: torch.device
) -> list[BlockMask]:
    """The masks of the branches by which any query sees a key."""
    ranges = find_ranges(remapping, first_query, queries, first_key, keys)
    with torch.inference_mode(False):  # as for the tables of angles: it may serve training afterwards
        return [_make_block_mask(one, keys, device) for one in ranges]


def _make_block_mask(keys_of_branch: KeyRange, keys: int, device: torch.device) -> BlockMask:
    """The blocks of keys that the kernel visits for each block of queries, and those that it masks key by key.

    create_block_mask would need a matrix of queries × keys.
    """
    begins = np.arange(0, len(keys_of_branch.first), _BLOCK)
    ends = np.minimum(begins + _BLOCK, len(keys_of_branch.first)) - 1
    lows = np.arange(0, keys, _BLOCK)
    highs = np.minimum(lows + _BLOCK, keys)
    seen = (highs > keys_of_branch.first[begins][:, None]) & (lows < keys_of_branch.stop[ends][:, None])
    whole = (lows >= keys_of_branch.first[ends][:, None]) & (highs <= keys_of_branch.stop[begins][:, None])
    whole &= (highs - lows == _BLOCK) & (ends - begins == _BLOCK - 1)[:, None]  # as in PyTorch's own block masks
    first, stop = (torch.tensor(bound, device=device) for bound in (keys_of_branch.first, keys_of_branch.stop))

    def inside(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[query]) & (key < stop[query])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole, device),
        *_listed(whole, device),
        BLOCK_SIZE=_BLOCK,
        mask_mod=inside,
        seq_lengths=(len(keys_of_branch.first), keys),
    )


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of chosen blocks of keys for each block of queries, and their indices, chosen ones first."""
    counts, order = chosen.sum(1), np.argsort(~chosen, axis=1, kind="stable")
    listed, which = (torch.tensor(one, dtype=torch.int32, device=device)[None, None] for one in (counts, order))
    return listed, which


def _merge(outputs: Sequence[Tensor], sums: Sequence[Tensor], sinks: Tensor | None) -> Tensor:
    """outputs: each shape (batch, heads, queries, width). sums: their log-sum-exps, (batch, heads, queries).

    Where a query sees nothing the log-sum-exp is -inf.
    """
    logs = torch.stack(tuple(sums)).float()
    most = logs.detach().amax(0)
    if sinks is not None:
        most = torch.maximum(most, sinks.detach()[:, None])
    weights = torch.exp(logs - most.masked_fill(most.isneginf(), 0.0))
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks.float()[:, None] - most)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return torch.stack([weight[..., None] * one.float() for weight, one in zip(weights, outputs, strict=True)]).sum(0)


def is_failed_compilation(error: Exception) -> bool:
    """Whether a kernel did not compile: no compiler, too little shared memory, or too many kinds of heads."""
    failures = torch._dynamo.exc
    return isinstance(error, failures.TorchDynamoException | failures.FailOnRecompileLimitHit)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)  # else, where it gave up, it would fill n × n matrices


def _capped(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
