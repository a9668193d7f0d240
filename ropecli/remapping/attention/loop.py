"""Goes over the blocks of queries, with the keys of each branch turned once for all of them."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ropecli.remapping.attention.ranges import Range
from ropecli.remapping.attention.scores import Hidden, Part, Softmax, attend_block
from ropecli.remapping.attention.tables import Sides
from ropecli.remapping.attention.turning import computing_dtype


class _Seen(NamedTuple):
    """What a block sees of a range, by the range's index: its keys, by their places among the range's."""

    range: int
    keys: slice


class _Block(NamedTuple):
    rows: slice
    seen: list[_Seen]

    @property
    def keys(self) -> int:
        return sum(one.keys.stop - one.keys.start for one in self.seen)


class Loop:
    """The blocks of a call to BlockAttention, whose arguments these are; rows: queries of a block."""

    def __init__(
        self,
        sides: Sequence[Sides],
        ranges: Sequence[Range],
        rows: int,
        first_query: int,
        first_key: int,
        scaling: float,
    ) -> None:
        self._sides = [sides[one.branch] for one in ranges]
        self._ranges = ranges
        self._blocks = list(_blocks(ranges, rows))
        self._first_query = first_query
        self._first_key = first_key
        self._scaling = scaling

    def run(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """query: shape (units, group, queries, head_dim); key, value: (units, keys, ...): a unit is a head of keys, and
        the group of query heads that share it. Returns value's dtype."""
        tensors = (query, key, value, softmax.sinks)
        recording = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)
        seen = [self._turn_keys(key, value, index) for index in range(len(self._ranges))]
        workspace = None if recording else self._workspace(query)
        results = []
        for block in self._blocks:
            attend = partial(self._attend, block, softmax, workspace)
            if recording:  # the backward pass computes scores anew: those of all blocks together would be n × n
                attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=softmax.dropout > 0)
            # each tensor an argument: what a function holds on to, a checkpoint around this one cannot let go of
            results.append(attend(query[:, :, block.rows], *chain.from_iterable(seen)).to(value.dtype))
        return torch.cat(results, 2)

    def _turn_keys(self, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """As far as any query sees them by the range of this index."""
        keys, table = self._ranges[index].whole, self._sides[index].key
        dtype = computing_dtype(key)
        own = key[:, keys].to(dtype)
        if table is not None:
            own = table.turn(own, self._first_key + keys.start)
        return own, value[:, keys].to(dtype)

    def _workspace(self, query: Tensor) -> Tensor:
        units, group = query.shape[:2]
        numbers = max(units * group * (block.rows.stop - block.rows.start) * (block.keys + 1) for block in self._blocks)
        return query.new_empty(2, numbers, dtype=computing_dtype(query))

    def _attend(
        self,
        block: _Block,
        softmax: Softmax,
        workspace: Tensor | None,
        query: Tensor,
        *seen: Tensor,
    ) -> Tensor:
        """query: of the block, shape (units, group, rows, head_dim). seen: keys and values of each range, in turn.
        Returns shape (units, group, rows, width)."""
        query = query.to(computing_dtype(query)) * self._scaling
        parts = []
        for one in block.seen:
            table = self._sides[one.range].query
            turned = query if table is None else table.turn(query, self._first_query + block.rows.start)
            key, value = seen[2 * one.range : 2 * one.range + 2]
            hidden = _hidden(self._ranges[one.range], block.rows, key.device)
            parts.append(Part(turned, key[:, one.keys], value[:, one.keys], hidden))
        if not parts:
            return query.new_zeros(*query.shape[:-1], seen[1].shape[-1])
        return attend_block(parts, softmax, workspace)


def _blocks(ranges: Sequence[Range], rows: int) -> list[_Block]:
    queries = len(ranges[0].first)
    blocks = []
    for begin in range(0, queries, rows):
        block = _Block(slice(begin, min(begin + rows, queries)), [])
        for index, one in enumerate(ranges):
            if (span := one.span(block.rows)) is not None:
                offset = one.whole.start
                block.seen.append(_Seen(index, slice(span.first - offset, span.stop - offset)))
        blocks.append(block)
    return blocks


def _hidden(range_: Range, rows: slice, device: torch.device) -> list[Hidden]:
    """Made when the block is gone through: masks of all blocks would be kept, in training, until the backward pass."""
    span = range_.span(rows)
    if span is None:
        return []
    return [
        Hidden(edge.first - span.first, edge.stop - span.first, torch.tensor(edge.hidden, device=device))
        for edge in span.edges
    ]
