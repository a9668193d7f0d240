"""The range of keys that each query sees in each branch of a remapping, as indices."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

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
