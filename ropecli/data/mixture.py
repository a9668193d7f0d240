"""Which source a position of the stream reads, and which of that source's sequences: in closed form."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ropecli.data.draws import generator

BLOCK = 1000
"""Positions in which every source has its share exactly."""


class Mixture:
    """Blocks of BLOCK positions; in each, every source holds its share of them, in an order drawn for that block.

    Shares are rounded by the largest remainder, and none is rounded to nothing. One source keeps every position as
    it is. Nothing is kept from one position to the next, so that a run goes on anywhere.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.shares = _shares(np.asarray(weights, dtype=np.float64), max(BLOCK, len(weights)))
        self._seed = seed

    def at(self, position: int) -> tuple[int, int]:
        """(source, how many of that source's sequences stand before it in the stream)."""
        block, offset = divmod(position, sum(self.shares))
        sources, ranks = _arrange(self.shares, self._seed, block)
        source = int(sources[offset])
        return source, block * self.shares[source] + int(ranks[offset])


def _shares(weights: np.ndarray, block: int) -> tuple[int, ...]:
    """Whole numbers, at least 1 each, that sum to `block`."""
    free = block - len(weights)  # what is shared out after each has one
    wanted = np.maximum(weights / weights.sum() * block - 1, 0)
    exact = wanted / wanted.sum() * free if wanted.sum() else wanted
    shares = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(shares - exact, kind="stable")
    shares[by_remainder[: free - shares.sum()]] += 1
    return tuple((shares + 1).tolist())


@lru_cache(maxsize=2)
def _arrange(shares: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """For each offset in the block: the source, and how many of the same source stand before it in the block."""
    sources = generator(seed, "mixture", block).permutation(np.repeat(np.arange(len(shares)), shares))
    by_source = np.argsort(sources, kind="stable")
    ranks = np.empty(len(sources), dtype=np.int64)
    ranks[by_source] = np.concatenate([np.arange(share) for share in shares])
    return sources, ranks
