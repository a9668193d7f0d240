"""Which keys a block of queries needs of each branch, and where among them a mask is; numbers alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ropecli.rope import Remapping


class Edge(NamedTuple):
    """Keys, by their index, that some of a block's queries see and others do not.

    hidden: shape (queries of the block, stop - first), true where the key is not seen.
    """

    first: int
    stop: int
    hidden: np.ndarray


class Span(NamedTuple):
    """The keys, by their index, that a block's queries see of one range. edges: where not all queries see them."""

    first: int
    stop: int
    edges: tuple[Edge, ...]


@dataclass(frozen=True, eq=False)
class KeyRange:
    """The keys that each query sees of one branch.

    branch: its index. first, stop: shape (queries,), indices of keys, which never fall.
    """

    branch: int
    first: np.ndarray
    stop: np.ndarray

    @property
    def whole(self) -> slice:
        """The keys that any query sees."""
        return slice(int(self.first[0]), int(self.stop[-1]))

    @property
    def counts(self) -> np.ndarray:
        return np.maximum(self.stop - self.first, 0)

    def span(self, rows: slice) -> Span | None:
        """Of a block of queries; None where they see nothing of this branch."""
        firsts, stops = self.first[rows], self.stop[rows]
        if not (stops > firsts).any():
            return None
        first, stop = int(firsts[0]), int(stops[-1])
        left, right = min(int(firsts[-1]), stop), max(int(stops[0]), first)
        edges = (
            Edge(first, left, np.arange(first, left) < firsts[:, None]),
            Edge(right, stop, np.arange(right, stop) >= stops[:, None]),
        )
        return Span(first, stop, tuple(edge for edge in edges if edge.stop > edge.first))


def find_ranges(remapping: Remapping, first_query: int, queries: int, first_key: int, keys: int) -> list[KeyRange]:
    """Of the branches of which any query sees a key that is there."""
    positions = np.arange(first_query, first_query + queries)
    ranges = []
    for index, branch in enumerate(remapping.branches):
        first, stop = (np.clip(bound(positions) - first_key, 0, keys) for bound in (branch.start, branch.stop))
        if (stop > first).any():
            ranges.append(KeyRange(index, first, stop))
    return ranges


def count_keys(ranges: Sequence[KeyRange], queries: int) -> np.ndarray:
    """How many keys each query sees; shape (queries,)."""
    return sum((one.counts for one in ranges), np.zeros(queries, dtype=np.int64))
