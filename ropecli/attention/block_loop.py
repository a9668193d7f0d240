"""Attention a block of queries after the other, with the keys of each branch rotated once for all blocks.

In a block, the scores of all branches stand side by side, under one softmax.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from ropecli.attention.key_ranges import KeyRange
from ropecli.attention.rotation import BranchRotation, computing_dtype


class Hidden(NamedTuple):
    """Of a part's keys, those from first to stop that not all its queries see.

    mask: shape (rows, stop - first), true where one is not seen.
    """

    first: int
    stop: int
    mask: Tensor


class BlockPart(NamedTuple):
    """What a block sees by one branch: a unit is a head of keys, and the group of query heads that share it.

    query: shape (units, group, rows, head_dim); key: (units, keys, head_dim); value: (units, keys, width).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Sequence[Hidden]


class Softmax(NamedTuple):
    """How scores become probabilities, as BlockAttention is told. sinks: shape (units, group)."""

    softcap: float | None
    sinks: Tensor | None
    dropout: float


def attend_block(parts: Sequence[BlockPart], softmax: Softmax, workspace: Tensor | None) -> Tensor:
    """Shape (units, group, rows, width).

    workspace: shape (2, numbers), where scores and probabilities are put, which spares fresh memory for each block.
    None where gradients are wanted: those need everything to stay as it was.
    """
    units, group, rows, _ = parts[0].query.shape
    stops = list(accumulate(part.key.shape[1] for part in parts))
    scores = _join(parts, softmax) if workspace is None else _write(parts, stops, softmax, workspace[0])
    _mask(scores.view(units, group, rows, -1), parts, stops)
    if workspace is None:
        probabilities = torch.softmax(scores, -1)
    else:
        probabilities = torch.softmax(scores, -1, out=workspace[1, : scores.numel()].view_as(scores))
    if softmax.dropout:
        probabilities = torch.nn.functional.dropout(probabilities, softmax.dropout)
    shares = [probabilities[..., stop - part.key.shape[1] : stop] for part, stop in zip(parts, stops, strict=True)]
    result = torch.bmm(shares[0], parts[0].value)
    for share, part in zip(shares[1:], parts[1:], strict=True):
        result = torch.baddbmm(result, share, part.value)
    return result.unflatten(1, (group, rows))


def _join(parts: Sequence[BlockPart], softmax: Softmax) -> Tensor:
    """Scores, shape (units, group·rows, keys of all parts, and one more where there are sinks)."""
    scores = [torch.bmm(part.query.flatten(1, 2), part.key.mT) for part in parts]
    if softmax.softcap:
        scores = [torch.tanh(one / softmax.softcap) * softmax.softcap for one in scores]
    if softmax.sinks is not None:
        scores.append(_column(softmax.sinks, parts[0].query.shape[2]))
    return torch.cat(scores, -1)


def _write(parts: Sequence[BlockPart], stops: Sequence[int], softmax: Softmax, space: Tensor) -> Tensor:
    """The same as _join, in `space`."""
    units, group, rows, _ = parts[0].query.shape
    width = stops[-1] + (softmax.sinks is not None)
    scores = space[: units * group * rows * width].view(units, group * rows, width)
    for part, stop in zip(parts, stops, strict=True):
        torch.bmm(part.query.flatten(1, 2), part.key.mT, out=scores[..., stop - part.key.shape[1] : stop])
    if softmax.softcap:
        scores[..., : stops[-1]].div_(softmax.softcap).tanh_().mul_(softmax.softcap)
    if softmax.sinks is not None:
        scores[..., stops[-1] :] = _column(softmax.sinks, rows)
    return scores


def _column(sinks: Tensor, rows: int) -> Tensor:
    return sinks[..., None].expand(-1, -1, rows).flatten(1)[..., None]


def _mask(scores: Tensor, parts: Sequence[BlockPart], stops: Sequence[int]) -> None:
    """scores: shape (units, group, rows, keys)."""
    lowest = torch.finfo(scores.dtype).min  # not -inf: a row of nothing else would become NaN, and so its gradients
    for part, stop in zip(parts, stops, strict=True):
        before = stop - part.key.shape[1]
        for first, last, mask in part.hidden:
            scores[..., before + first : before + last].masked_fill_(mask, lowest)


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


class BlockLoop:
    """The blocks of a call to BlockAttention, whose arguments these are; rows: queries of a block."""

    def __init__(
        self,
        sides: Sequence[BranchRotation],
        ranges: Sequence[KeyRange],
        rows: int,
        first_query: int,
        first_key: int,
        scaling: float,
    ) -> None:
        self._sides = [sides[one.branch] for one in ranges]
        self._ranges = ranges
        self._first_query = first_query
        self._first_key = first_key
        self._scaling = scaling
        self.blocks = _blocks(ranges, rows)

    def run(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """query: shape (units, group, queries, head_dim); key, value: (units, keys, ...): a unit is a head of keys, and
        the group of query heads that share it. Returns value's dtype."""
        seen = [self._rotate_keys(key, value, index) for index in range(len(self._ranges))]
        options = softmax._replace(sinks=None)  # what a function holds on to, a checkpoint around it cannot let go of
        return _AllBlocks.apply(self, options, value.dtype, query, softmax.sinks, *chain.from_iterable(seen))

    def _rotate_keys(self, key: Tensor, value: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """As far as any query sees them by the range of this index."""
        keys, table = self._ranges[index].whole, self._sides[index].key
        dtype = computing_dtype(key)
        own = key[:, keys].to(dtype)
        if table is not None:
            own = table.rotate(own, self._first_key + keys.start)
        return own, value[:, keys].to(dtype)

    def workspace(self, query: Tensor) -> Tensor:
        units, group = query.shape[:2]
        numbers = max(units * group * (block.rows.stop - block.rows.start) * (block.keys + 1) for block in self.blocks)
        return query.new_empty(2, numbers, dtype=computing_dtype(query))

    def attend(
        self, block: _Block, softmax: Softmax, workspace: Tensor | None, query: Tensor, seen: Sequence[Tensor]
    ) -> Tensor:
        """query: of the block, shape (units, group, rows, head_dim). seen: the keys and the values that the block sees
        of each range, in turn. Returns shape (units, group, rows, width)."""
        query = query.to(computing_dtype(query)) * self._scaling
        parts = []
        for one, key, value in zip(block.seen, seen[0::2], seen[1::2], strict=True):
            table = self._sides[one.range].query
            rotated = query if table is None else table.rotate(query, self._first_query + block.rows.start)
            parts.append(BlockPart(rotated, key, value, _hidden(self._ranges[one.range], block.rows, key.device)))
        return attend_block(parts, softmax, workspace)


class _AllBlocks(torch.autograd.Function):
    """The blocks one after the other; the backward pass computes their scores anew, each block's alone.

    What is kept is made before all blocks: tensors kept from between them would leave holes of each block's size in the
    process's memory, into which no larger one fits, and all those holes together are n × n.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loop: BlockLoop,
        softmax: Softmax,
        dtype: torch.dtype,
        query: Tensor,
        sinks: Tensor | None,
        *seen: Tensor,
    ) -> Tensor:
        ctx.loop, ctx.softmax = loop, softmax
        ctx.random = (torch.get_rng_state(), get_device_states(query)) if softmax.dropout else None
        ctx.save_for_backward(query, sinks, *seen)
        result = query.new_zeros(*query.shape[:-1], seen[1].shape[-1], dtype=dtype)
        workspace = loop.workspace(query)
        with _full_precision(query.device):
            for block in loop.blocks:
                own, *pieces = _pieces(block, query, seen)
                result[:, :, block.rows] = loop.attend(block, softmax._replace(sinks=sinks), workspace, own, pieces)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        query, sinks, *seen = ctx.saved_tensors
        of_query, *of_seen = (torch.zeros_like(one) for one in (query, *seen))
        of_sinks = None if sinks is None else torch.zeros_like(sinks)
        with _full_precision(query.device), _again(ctx.random, query.device):
            for block in ctx.loop.blocks:
                leaves = [one.detach().requires_grad_() for one in _pieces(block, query, seen)]
                totals = _pieces(block, of_query, of_seen)
                own, *pieces = leaves
                softmax = ctx.softmax
                if sinks is not None and of_sinks is not None:
                    softmax = softmax._replace(sinks=sinks.detach().requires_grad_())
                    leaves, totals = [*leaves, softmax.sinks], [*totals, of_sinks]
                with torch.enable_grad():
                    result = ctx.loop.attend(block, softmax, None, own, pieces)
                found = torch.autograd.grad(result, leaves, upstream[:, :, block.rows].to(result.dtype))
                for total, one in zip(totals, found, strict=True):
                    total.add_(one)
        return None, None, None, of_query, of_sinks, *of_seen


def _pieces(block: _Block, query: Tensor, seen: Sequence[Tensor]) -> list[Tensor]:
    """What a block needs of its queries, and of the keys and the values of each range that it sees, in turn."""
    of_ranges = ([seen[2 * one.range][:, one.keys], seen[2 * one.range + 1][:, one.keys]] for one in block.seen)
    return [query[:, :, block.rows], *chain.from_iterable(of_ranges)]


def _full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Without autocast, which would make the scores half precision; the meta device has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


@contextmanager
def _again(random: Any, device: torch.device) -> Iterator[None]:
    """The backward pass drops what the forward pass has dropped. random: of that one; None where it dropped nothing."""
    if random is None:
        yield
        return
    state, (devices, states) = random
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.set_rng_state(state)
        set_device_states(devices, states, device_type=device.type)
        yield


def _blocks(ranges: Sequence[KeyRange], rows: int) -> list[_Block]:
    """Those that see any key."""
    queries = len(ranges[0].first)
    blocks = []
    for begin in range(0, queries, rows):
        block = _Block(slice(begin, min(begin + rows, queries)), [])
        for index, one in enumerate(ranges):
            if (span := one.span(block.rows)) is not None:
                offset = one.whole.start
                block.seen.append(_Seen(index, slice(span.first - offset, span.stop - offset)))
        if block.seen:
            blocks.append(block)
    return blocks


def _hidden(keys_of_branch: KeyRange, rows: slice, device: torch.device) -> list[Hidden]:
    """Made when the block is gone through: masks of all blocks are many times those of one."""
    span = keys_of_branch.span(rows)
    if span is None:
        return []
    return [
        Hidden(edge.first - span.first, edge.stop - span.first, torch.tensor(edge.hidden, device=device))
        for edge in span.edges
    ]
