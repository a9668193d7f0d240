"""Random choices in the training data: which documents of a source are used, and which source comes next.

Length upsampling within a source follows Fu et al. 2024, arXiv:2402.10171, section 3, and the code released with it:
documents of 4,096 tokens or more are kept, of shorter ones a tenth, and each source is read until its budget of
tokens, its share of the original mixture, is used up; so the mixture of sources stays and the lengths change. Here
lengths are counted in tokens, not estimated from characters; the last document is cut where the budget ends, not
taken whole; and a mixture's shares are weights of their own (`Mixture`).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BLOCK = 1000
"""Positions in which every source has its share exactly."""


def seeded_generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """Random numbers from the seed, their purpose and numbers alone; independent of what was drawn before."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *numbers])


@dataclass(frozen=True)
class Selection:
    """documents: shape (used,), int64, ascending. lengths: the same shape, tokens used of each.

    too_short, not_drawn, over_budget: documents left out, of `of` documents. cut: whether the budget cut one.
    """

    documents: np.ndarray
    lengths: np.ndarray
    of: int
    too_short: int
    not_drawn: int
    over_budget: int
    cut: bool


def select_documents(
    lengths: np.ndarray,
    least: int,
    *,
    long_from: int | None = None,
    keep_short: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    source: int = 0,
) -> Selection:
    """lengths: of all documents, tokens. least: those shorter are never used. source: its number in the mixture.

    Whether a short document is kept hangs on the seed and its number alone; so does the order in which documents
    are taken until they make `max_tokens`.
    """
    enough = lengths >= least
    drawn = enough
    if long_from is not None and keep_short < 1:
        chances = seeded_generator(seed, "keep short documents", source).random(len(lengths))
        drawn = enough & ((lengths >= long_from) | (chances < keep_short))
    documents = np.flatnonzero(drawn)
    used = lengths[documents]
    if max_tokens is not None:
        order = seeded_generator(seed, "budget of tokens", source).permutation(len(lengths))
        by_chance = np.argsort(order[documents], kind="stable")
        before = np.empty_like(used)
        before[by_chance] = np.cumsum(used[by_chance]) - used[by_chance]
        used = np.minimum(used, np.maximum(max_tokens - before, 0))
    within = used > 0
    return Selection(
        documents[within],
        used[within],
        of=len(lengths),
        too_short=int(len(lengths) - enough.sum()),
        not_drawn=int(enough.sum() - drawn.sum()),
        over_budget=int(len(documents) - within.sum()),
        cut=bool((used[within] < lengths[documents[within]]).any()),
    )


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
    sources = seeded_generator(seed, "mixture", block).permutation(np.repeat(np.arange(len(shares)), shares))
    by_source = np.argsort(sources, kind="stable")
    ranks = np.empty(len(sources), dtype=np.int64)
    ranks[by_source] = np.concatenate([np.arange(share) for share in shares])
    return sources, ranks
