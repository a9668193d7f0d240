"""Attention over one block of queries at a time, with one softmax over the keys of all branches.

Extra memory is O(block × keys), never O(n × n). Source: Rabe and Staats 2021 (arXiv:2112.05682). Heads are already
rotated. A unit is a key head with the group of query heads that share it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ropecli.rope import Branch, Remapping


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
        widths = [key.shape[1] for key in keys] + [1] * len(sinks)
        # without gradients the branches write into one matrix, and need not be copied together
        matrix = None if torch.is_grad_enabled() else queries[0].new_empty(units, group * rows, sum(widths))
        parts: Any = [None] * count if matrix is None else matrix.split(widths, -1)[:count]
        # autocast would compute the scores in half precision
        with torch.autocast(queries[0].device.type, enabled=False):
            columns = [self._scores(block, *branch) for branch in zip(self.ranges, queries, keys, parts, strict=True)]
            columns += [sink[..., None, None].expand(-1, -1, rows, 1).flatten(1, 2) for sink in sinks]
            if matrix is None:
                scores = torch.cat(columns, -1)
            else:
                scores = matrix
                if sinks:
                    matrix[..., -1:] = columns[-1]
            del columns
            shares = torch.softmax(scores, -1).split(widths, -1)[:count]
            result = torch.bmm(shares[0], values[0])
            for share, value in zip(shares[1:], values[1:], strict=True):
                result = torch.baddbmm(result, share, value)
        return result.view(units, group, rows, -1)

    def _scores(self, block: slice, keys_of_branch: KeyRange, query: Tensor, key: Tensor, out: Tensor | None) -> Tensor:
        """Shape (units, group · rows, keys). out: to write them to."""
        rows = query.shape[2]
        scores = torch.bmm(query.flatten(1, 2) * self.scaling, key.mT, out=out)
        if self.softcap:
            scores = torch.mul(torch.tanh(scores / self.softcap), self.softcap, out=out)
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
