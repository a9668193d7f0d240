"""The score of a query and a key of ones, as a function of distance, and the distances that attention sees.

Sources: "embedding and rope" (blog, 5 February 2025); Men et al. 2024 (arXiv:2405.14591), section 4, for the first
negative score.
"""

import math
from collections.abc import Callable

import numpy as np

from ropecli.scaling.spec import ScaledRope

FARTHEST_CHECKED = 2**22
"""The largest distance, tokens, up to which every distance is checked."""
_PIECE = 2**18
"""Multiplications per matrix product. OpenBLAS computes products of this size in one thread; on a busy machine, several
threads would wait for each other much longer than the work takes."""


def score(inv_freq: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Σ_i 2·cos(mθ_i) for each distance m, tokens, any shape; NaN where a distance is NaN."""
    return 2 * np.cos(np.multiply.outer(distances, inv_freq)).sum(axis=-1)


def scores(inv_freq: np.ndarray, start: int, stop: int) -> np.ndarray:
    """`score` at every integer distance from start to stop - 1, shape (stop - start,). A million take about 20 ms.

    cos((a + b)θ) = cos aθ·cos bθ - sin aθ·sin bθ, so the scores of a grid of distances are one matrix product.
    """
    firsts, rest = _grid(start, stop)
    angles = np.multiply.outer(firsts, inv_freq)
    weights = np.concatenate([2 * np.cos(angles), -2 * np.sin(angles)], axis=1)
    return _product(weights, inv_freq, rest).ravel()[: stop - start]


def changes(inv_freq: np.ndarray, start: int, stop: int) -> np.ndarray:
    """score(m) - score(m - 1) at every integer distance m from start to stop - 1.

    Computed without cancellation: 2·cos mθ - 2·cos (m - 1)θ = -4·sin(θ/2)·sin((m - ½)θ).
    """
    firsts, rest = _grid(start, stop)
    angles, weights = np.multiply.outer(firsts - 0.5, inv_freq), -4 * np.sin(inv_freq / 2)
    weighted = np.concatenate([weights * np.sin(angles), weights * np.cos(angles)], axis=1)
    return _product(weighted, inv_freq, rest).ravel()[: stop - start]


def first_rise(inv_freq: np.ndarray, longest: int = FARTHEST_CHECKED) -> int | None:
    """The first distance m, tokens, with score(m) >= score(m - 1); None if there is none up to `longest`.

    The blog says that oscillation begins near the effective range. With θ_0 = 1 it begins after a few tokens; only a
    moving average of the score falls up to the effective range. None also if no pair rotates.
    """
    if not inv_freq.any():
        return None
    return _first(longest, lambda start, stop: changes(inv_freq, start, stop) >= 0)


def first_negative(inv_freq: np.ndarray, longest: int = FARTHEST_CHECKED) -> int | None:
    """The first distance, tokens, with a negative score; None if there is none up to `longest`.

    From there on, a key similar to the query can get a lower score than a random key. Men et al. call this distance
    the longest context that the frequencies support.
    """
    if 2 * np.count_nonzero(inv_freq) <= len(inv_freq):  # pairs that do not rotate outweigh the others
        return None
    return _first(longest, lambda start, stop: scores(inv_freq, start, stop) < 0)


def largest_distance(rope: ScaledRope, target: int) -> int:
    """The largest distance ρ within `target` tokens, rounded down; target - 1 without a remapping.

    The last token, or the last one within the pretraining length, sees it at the first key of a branch.
    """
    if rope.remapping is None:
        return target - 1
    branches, last = rope.remapping.branches, np.array([min(rope.remapping.pretrained, target) - 1, target - 1])
    firsts = np.concatenate([branch.start(last)[branch.start(last) < branch.stop(last)] for branch in branches])
    return int(np.nanmax(rope.remapping.distances(last, firsts)))


def _first(longest: int, holds: Callable[[int, int], np.ndarray]) -> int | None:
    """The first distance from 1 on at which `holds` is true, searched in growing blocks."""
    start, wide = 1, 4096
    while start <= longest:
        hits = np.flatnonzero(holds(start, min(start + wide, longest + 1)))
        if hits.size:
            return start + int(hits[0])
        start, wide = start + wide, 4 * wide
    return None


def _grid(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays whose pairwise sums are the integers from start to stop - 1, plus a few more."""
    wide = math.isqrt(stop - start - 1) + 1
    return np.arange(start, stop, wide), np.arange(wide)


def _product(weights: np.ndarray, inv_freq: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Multiply `weights`, shape (firsts, rotary_dim), by the cosines and sines of `rest`, in blocks of rows."""
    angles = np.multiply.outer(inv_freq, rest)
    waves = np.concatenate([np.cos(angles), np.sin(angles)])
    rows = max(1, _PIECE // waves.size)
    product = np.empty((len(weights), len(rest)))
    for start in range(0, len(weights), rows):
        np.matmul(weights[start : start + rows], waves, out=product[start : start + rows])
    return product
