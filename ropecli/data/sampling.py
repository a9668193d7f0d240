"""Random choices in the training data: documents of a source, the source that comes next, positions with gaps.

Per-source length upsampling follows Fu et al. 2024, arXiv:2402.10171, section 3, and its released code: keep all
documents of at least 4,096 tokens and a tenth of the shorter ones, and read each source until its token budget (its
share of the original mixture) is used up. The mixture stays the same and the lengths change. Unlike that code,
lengths are counted in tokens, not estimated from characters; the last document is cut at the budget; and the shares
of a mixture are separate weights (`Mixture`).

Positions with gaps let short sequences cover a longer context length. `pose`: Zhu et al. 2023, arXiv:2309.10400,
section 3.2, equations 3 and 4. A sequence is split into N chunks of random lengths. The positions of chunk i are
shifted by a skipping bias u_i, uniform on {u_{i-1}, ..., context length − length}, with u_0 = 0. The paper does not
specify the distribution of the chunk lengths; here all splits are equally likely (the authors' code for N = 2 keeps the
first chunk in the first half). The text skips along, v_i = u_i in equation 5, an alternative that the paper mentions,
up to the document's end: a document only needs to fill a sequence, not the context length.
`randomized`: Ruoss et al. 2023, arXiv:2305.16843, section 3. Positions are drawn from the context length without
replacement, sorted, and shifted to start at 0: transformers treats position 0 as the start of a document.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ropecli.errors import RecipeError

BLOCK = 1000
"""Stream positions per block; each block contains every source's exact share."""


def seeded_generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A generator that depends only on the seed, the purpose and the numbers, not on earlier draws."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *numbers])


@dataclass(frozen=True)
class Selection:
    """documents: shape (used,), int64, ascending. lengths: the same shape, tokens used of each.

    of: number of documents in the source. skipped: number of skipped ones by reason.
    """

    documents: np.ndarray
    lengths: np.ndarray
    of: int
    skipped: dict[str, int]


def select_documents(
    lengths: np.ndarray,
    least: int,
    *,
    held_out: np.ndarray | None = None,
    long_from: int | None = None,
    keep_short: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    source: int = 0,
) -> Selection:
    """Select the documents of a source to train on.

    lengths: of all documents, tokens. least: shorter documents are never used. held_out: of all documents, whether it
    is measured on, and so never used. source: its index in the mixture.
    Whether a short document is kept depends only on the seed and its index; so does the order in which documents are
    taken up to `max_tokens`.
    """
    long_enough = lengths >= least
    free = long_enough if held_out is None else long_enough & ~held_out
    drawn = free
    if long_from is not None and keep_short < 1:
        chances = seeded_generator(seed, "keep short documents", source).random(len(lengths))
        drawn = free & ((lengths >= long_from) | (chances < keep_short))
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
        skipped={
            "too short": int(len(lengths) - long_enough.sum()),
            "measured on": int(long_enough.sum() - free.sum()),
            "skipped by keep_short": int(free.sum() - drawn.sum()),
            "beyond max_tokens": int(len(documents) - within.sum()),
        },
    )


class Mixture:
    """The source of each stream position. Each block of BLOCK positions has every source's share, in random order.

    Shares are rounded by the largest-remainder method, to at least one. With one source, positions are unchanged. There
    is no state between positions, so a run can resume anywhere.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        self.shares = _shares(np.asarray(weights, dtype=np.float64), max(BLOCK, len(weights)))
        self._seed = seed

    def at(self, position: int) -> tuple[int, int]:
        """(source, number of that source's sequences before this position)."""
        block, offset = divmod(position, sum(self.shares))
        sources, ranks = _arrange(self.shares, self._seed, block)
        source = int(sources[offset])
        return source, block * self.shares[source] + int(ranks[offset])


def _shares(weights: np.ndarray, block: int) -> tuple[int, ...]:
    """Whole numbers, at least 1 each, that sum to `block`."""
    free = block - len(weights)  # left after each source has one
    ideal = np.maximum(weights / weights.sum() * block - 1, 0)
    exact = ideal / ideal.sum() * free if ideal.sum() else ideal
    shares = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(shares - exact, kind="stable")
    shares[by_remainder[: free - shares.sum()]] += 1
    return tuple((shares + 1).tolist())


@lru_cache(maxsize=2)
def _arrange(shares: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """For each offset in the block: the source, and the number of earlier offsets with the same source."""
    sources = seeded_generator(seed, "mixture", block).permutation(np.repeat(np.arange(len(shares)), shares))
    by_source = np.argsort(sources, kind="stable")
    ranks = np.empty(len(sources), dtype=np.int64)
    ranks[by_source] = np.concatenate([np.arange(share) for share in shares])
    return sources, ranks


def refuse_impossible_positions(kind: str, length: int, context_length: int, chunks: int) -> None:
    """Raise RecipeError if sequences of `length` tokens cannot have positions of this kind. chunks: of `pose`."""
    if kind != "full" and length > context_length:
        raise RecipeError(
            f"--positions {kind} cannot fit sequences of {length} tokens into {context_length} positions. "
            "Use a longer context or shorter sequences."
        )
    if kind == "pose" and chunks > length:
        raise RecipeError(f"pose_chunks: {chunks} chunks need at least {chunks} tokens, but a sequence has {length}.")


def positions_of(kind: str, length: int, context_length: int, chunks: int, seed: int, at: int) -> np.ndarray:
    """Positions of a sequence, shape (length,), int64, increasing from 0 to at most context_length − 1.

    chunks: of `pose`. at: index of the sequence in the stream; part of the random seed, so positions differ in every
    epoch.
    """
    if kind == "full":
        return np.arange(length)
    draw = seeded_generator(seed, "positions", at)
    if kind == "randomized":
        drawn = np.sort(draw.choice(context_length, length, replace=False, shuffle=False))
        return drawn - drawn[0]
    borders = 1 + np.sort(draw.choice(length - 1, chunks - 1, replace=False, shuffle=False))
    bias, positions = 0, np.arange(length)
    for start, stop in zip(borders, [*borders[1:], length], strict=True):
        bias = int(draw.integers(bias, context_length - length, endpoint=True))
        positions[start:stop] += bias
    return positions
