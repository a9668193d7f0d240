"""The score of a query and a key over their distance, content put aside: both hold ones.

Sources: "embedding and rope" (blog, 5 February 2025); Men et al. 2024 (arXiv:2405.14591), section 4, for the distance
at which it is first negative.
"""

import math
from collections.abc import Callable

import numpy as np

LONGEST = 2**22
"""Tokens up to which a negative score is looked for."""


def score(inv_freq: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Σ_i 2·cos(mθ_i) for each distance m, tokens, of whatever shape; NaN where a distance is NaN."""
    return 2 * np.cos(np.multiply.outer(distances, inv_freq)).sum(axis=-1)


def scores(inv_freq: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The same at every whole distance from start to stop - 1, shape (stop - start,): a million in some milliseconds.

    cos((a + b)θ) = cos aθ·cos bθ - sin aθ·sin bθ, so that a grid of distances is a product of two narrow matrices.
    """
    wide = math.isqrt(stop - start - 1) + 1
    firsts = np.multiply.outer(np.arange(start, stop, wide), inv_freq)
    rest = np.multiply.outer(np.arange(wide), inv_freq)
    grid = np.cos(firsts) @ np.cos(rest).T - np.sin(firsts) @ np.sin(rest).T
    return 2 * grid.ravel()[: stop - start]


def first_rise(inv_freq: np.ndarray, longest: int = LONGEST) -> int | None:
    """The first distance, tokens, whose score is not below that of the one before; None up to `longest`.

    The blog lets oscillation begin near the effective range. With θ_0 = 1 it begins after a handful of tokens: what
    falls up to the effective range is the score's mean over neighbours, not the score.
    """
    return _first(inv_freq, longest, lambda here, before: here >= before)


def first_negative(inv_freq: np.ndarray, longest: int = LONGEST) -> int | None:
    """The first distance, tokens, at which the score is negative; None up to `longest`.

    From there on a key like the query can count for less than a key like nothing: Men et al. take the distance for the
    longest context that the frequencies support.
    """
    return _first(inv_freq, longest, lambda here, before: here < 0)


def _first(inv_freq: np.ndarray, longest: int, which: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> int | None:
    start, wide = 1, 4096
    while start <= longest:
        found = scores(inv_freq, start - 1, min(start + wide, longest + 1))
        hits = np.flatnonzero(which(found[1:], found[:-1]))
        if hits.size:
            return start + int(hits[0])
        start, wide = start + wide, 4 * wide
    return None
