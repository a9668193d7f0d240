"""Attention over the keys of all branches with one softmax: block by block, or by fused kernels on a GPU.

Heads are already rotated. Block by block, extra memory is O(block × keys), never O(n × n): Rabe and Staats 2021
(arXiv:2112.05682). There, a unit is a key head with the group of query heads that share it. On a GPU, one fused kernel
runs per branch (FlexAttention, Dong et al. 2024, arXiv:2412.05496), and their results are merged by log-sum-exps (Dao
et al. 2022, arXiv:2205.14135, section 3.1).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ropecli.rope import Branch, Remapping

_BLOCK = 128  # queries, or keys, of a block of a fused kernel's mask
_SMALLEST_HEAD, _LARGEST_HEAD = 16, 256
"""Head dimensions of the fused kernels. Larger heads do not fit into the shared memory of every GPU."""


@dataclass(frozen=True, eq=False)
class KeyRange:
    """The keys that each query sees in one branch. first, stop: shape (queries,), ascending."""

    branch: Branch
    first: np.ndarray
    stop: np.ndarray

    def keys(self, rows: slice) -> slice:
        """The keys that any query of the block sees."""
        return slice(int(self.first[rows][0]), int(self.stop[rows][-1]))

    def hidden(self, rows: slice) -> Iterator[tuple[slice, np.ndarray]]:
        """Parts of keys(rows) that some queries do not see: (columns, mask (rows, columns), true if hidden)."""
        keys, firsts, stops = self.keys(rows), self.first[rows], self.stop[rows]
        begin, end = min(int(firsts[-1]), keys.stop), max(int(stops[0]), keys.start)
        if begin > keys.start:
            yield slice(0, begin - keys.start), np.arange(keys.start, begin) < firsts[:, None]
        if end < keys.stop:
            yield slice(end - keys.start, None), np.arange(end, keys.stop) >= stops[:, None]


def find_ranges(remapping: Remapping, first_query: int, queries: int, first_key: int, keys: int) -> list[KeyRange]:
    """The ranges of all branches in which any query sees a key."""
    positions = np.arange(first_query, first_query + queries)
    ranges = []
    for branch in remapping.branches:
        first, stop = (np.clip(bound(positions) - first_key, 0, keys) for bound in (branch.start, branch.stop))
        if (stop > first).any():
            ranges.append(KeyRange(branch, first, np.maximum(first, stop)))
    return ranges


class BlockLoop(NamedTuple):
    """Loop over blocks of queries. ranges: the keys of each branch. rows: queries per block.

    last_alone: compute only the last block, which sees the most keys, to estimate memory.
    """

    ranges: Sequence[KeyRange]
    rows: int
    scaling: float
    softcap: float | None
    last_alone: bool = False

    def run(self, rotated: Iterable[tuple[Tensor, Tensor]], value: Tensor, *sinks: Tensor) -> Tensor:
        """rotated: per branch, queries, shape (units, group, queries, head_dim), and keys, (units, keys, head_dim).

        value: shape (units, keys, width). sinks: shape (units, group), if any. Returns shape (units, group, queries,
        width).
        """
        queries, keys = zip(*rotated, strict=True)
        return _AllBlocks.apply(self, *queries, *keys, value, *sinks)

    def blocks(self) -> Iterator[slice]:
        queries = len(self.ranges[0].first)
        begins = range(0, queries, self.rows)[-1:] if self.last_alone else range(0, queries, self.rows)
        return (slice(begin, min(begin + self.rows, queries)) for begin in begins)

    def pieces(self, block: slice, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of a block's part of the tensors: per branch its queries, visible keys and values; then the sinks.

        tensors: see _AllBlocks.
        """
        count = len(self.ranges)
        queries, keys, (value, *sinks) = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        seen = [keys_of_branch.keys(block) for keys_of_branch in self.ranges]
        return [
            *(query[:, :, block] for query in queries),
            *(key[:, places] for key, places in zip(keys, seen, strict=True)),
            *(value[:, places] for places in seen),
            *sinks,
        ]

    def attend(self, block: slice, pieces: Sequence[Tensor]) -> Tensor:
        """Shape (units, group, rows, width)."""
        count = len(self.ranges)
        queries, keys, values, sinks = (pieces[first : first + count] for first in range(0, 4 * count, count))
        units, group, rows, _ = queries[0].shape
        # autocast would compute the scores in half precision
        with torch.autocast(queries[0].device.type, enabled=False):
            columns = [self._scores(block, *branch) for branch in zip(self.ranges, queries, keys, strict=True)]
            columns += [sink[..., None, None].expand(-1, -1, rows, 1).flatten(1, 2) for sink in sinks]
            widths = [scores.shape[-1] for scores in columns]
            shares = torch.softmax(torch.cat(columns, -1), -1).split(widths, -1)[:count]
            result = torch.bmm(shares[0], values[0])
            for share, value in zip(shares[1:], values[1:], strict=True):
                result = torch.baddbmm(result, share, value)
        return result.view(units, group, rows, -1)

    def _scores(self, block: slice, keys_of_branch: KeyRange, query: Tensor, key: Tensor) -> Tensor:
        """Shape (units, group · rows, keys)."""
        rows = query.shape[2]
        scores = torch.bmm(query.flatten(1, 2) * self.scaling, key.mT)
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        lowest = torch.finfo(scores.dtype).min  # not -inf: rows without visible keys, and their gradients, would be NaN
        for places, hidden in keys_of_branch.hidden(block):
            by_head = scores.unflatten(1, (-1, rows))
            by_head[..., places].masked_fill_(torch.tensor(hidden, device=scores.device), lowest)
        return scores


class _AllBlocks(torch.autograd.Function):
    """Attends block by block; the backward pass recomputes the scores of each block.

    Results and gradients are allocated before the first block. Allocating them between blocks would fragment memory.
    """

    @staticmethod
    def forward(ctx: Any, loop: BlockLoop, *tensors: Tensor) -> Tensor:
        """tensors: the queries of all branches, the keys of all branches, the values, and the sinks, if any."""
        query, value = tensors[0], tensors[2 * len(loop.ranges)]
        ctx.loop = loop
        ctx.save_for_backward(*tensors)
        result = query.new_empty(*query.shape[:-1], value.shape[-1])
        for block in loop.blocks():
            result[:, :, block] = loop.attend(block, loop.pieces(block, tensors))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        loop, tensors = ctx.loop, ctx.saved_tensors
        gradients = [torch.zeros_like(tensor) for tensor in tensors]
        for block in loop.blocks():
            pieces = [piece.detach().requires_grad_() for piece in loop.pieces(block, tensors)]
            with torch.enable_grad():
                result = loop.attend(block, pieces)
            of_block = torch.autograd.grad(result, pieces, upstream[:, :, block])
            for total, gradient in zip(loop.pieces(block, gradients), of_block, strict=True):
                total.add_(gradient)
        return None, *gradients


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
