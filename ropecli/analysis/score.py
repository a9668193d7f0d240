"""The score of a query and a key over their distance, where both hold ones; and which distances attention sees.

Sources: "embedding and rope" (blog, 5 February 2025); Men et al. 2024 (arXiv:2405.14591), section 4, for the distance
at which it is first negative.
"""

import math
from collections.abc import Callable

import numpy as np

from ropecli.scaling.spec import ScaledRope

LONGEST = 2**22
"""Tokens up to which distances are looked at one by one."""
_PIECE = 2**18
"""Multiplications in a product that OpenBLAS leaves to one thread. Several wait for each other where the machine is
busy, many times as long as so little work takes."""


def score(inv_freq: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Σ_i 2·cos(mθ_i) for each distance m, tokens, of whatever shape; NaN where a distance is NaN."""
    return 2 * np.cos(np.multiply.outer(distances, inv_freq)).sum(axis=-1)


def scores(inv_freq: np.ndarray, start: int, stop: int) -> np.ndarray:
    """The same at every whole distance from start to stop - 1, shape (stop - start,): a million in some 20 ms."""
    firsts, rest = _grid(start, stop)
    return score_grid(inv_freq, firsts, rest).ravel()[: stop - start]


def score_grid(inv_freq: np.ndarray, firsts: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """The same at the sum of each of `firsts` and each of `rest`, shape (firsts, rest).

    cos((a + b)θ) = cos aθ·cos bθ - sin aθ·sin bθ, so that a grid of distances is a product of two narrow matrices.
    """
    angles = np.multiply.outer(firsts, inv_freq)
    return _product(np.concatenate([2 * np.cos(angles), -2 * np.sin(angles)], axis=1), inv_freq, rest)


def changes(inv_freq: np.ndarray, start: int, stop: int) -> np.ndarray:
    """By how much the score at each distance from start to stop - 1 is above that at the one before.

    2·cos mθ - 2·cos (m - 1)θ = -4·sin(θ/2)·sin((m - ½)θ), which keeps the digits that a difference of scores loses.
    """
    firsts, rest = _grid(start, stop)
    angles, weights = np.multiply.outer(firsts - 0.5, inv_freq), -4 * np.sin(inv_freq / 2)
    turned = np.concatenate([weights * np.sin(angles), weights * np.cos(angles)], axis=1)
    return _product(turned, inv_freq, rest).ravel()[: stop - start]


def first_rise(inv_freq: np.ndarray, longest: int = LONGEST) -> int | None:
    """The first distance, tokens, whose score is not below that of the one before; None up to `longest`.

    The blog lets oscillation begin near the effective range. With θ_0 = 1 it begins after a handful of tokens: what
    falls up to the effective range is the score's mean over neighbours, not the score. None too where no pair turns.
    """
    if not inv_freq.any():
        return None
    return _first(longest, lambda start, stop: changes(inv_freq, start, stop) >= 0)


def first_negative(inv_freq: np.ndarray, longest: int = LONGEST) -> int | None:
    """The first distance, tokens, at which the score is negative; None up to `longest`.

    From there on a key like the query can count for less than a key like nothing: Men et al. take the distance for the
    longest context that the frequencies support.
    """
    if 2 * np.count_nonzero(inv_freq) <= len(inv_freq):  # the pairs that stand still outweigh the others
        return None
    return _first(longest, lambda start, stop: scores(inv_freq, start, stop) < 0)


def seen_distances(rope: ScaledRope, target: int, distances: np.ndarray | None = None) -> np.ndarray:
    """The distance ρ that the last of `target` tokens sees in place of each true one; NaN where that is masked.

    distances: whole ones below target, shape (n,); all of them, from 0 on, unless given.
    """
    true = np.arange(target) if distances is None else distances
    if rope.remapping is None:
        return true.astype(np.float64)
    return rope.remapping.distances(np.array([target - 1]), target - 1 - true)[0]


def largest_distance(rope: ScaledRope, target: int) -> int:
    """The largest ρ that the last of `target` tokens sees: of the first key in one of its branches, in every method.

    In whole tokens, rounded down: L tokens have distances below L. No token before the last sees a larger one.
    """
    if rope.remapping is None:
        return target - 1
    last = np.array([target - 1])
    firsts = [branch.start(last) for branch in rope.remapping.branches if branch.start(last) < branch.stop(last)]
    return int(max(seen_distances(rope, target, last - first).max() for first in firsts))


def _first(longest: int, holds: Callable[[int, int], np.ndarray]) -> int | None:
    """The first distance from 1 on at which it holds, by ever longer stretches."""
    start, wide = 1, 4096
    while start <= longest:
        hits = np.flatnonzero(holds(start, min(start + wide, longest + 1)))
        if hits.size:
            return start + int(hits[0])
        start, wide = start + wide, 4 * wide
    return None


def _grid(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers whose sums are those from start to stop - 1, and a few more."""
    wide = math.isqrt(stop - start - 1) + 1
    return np.arange(start, stop, wide), np.arange(wide)


def _product(turned: np.ndarray, inv_freq: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """turned, shape (firsts, rotary_dim), by the cosines and sines of `rest`, piece by piece."""
    angles = np.multiply.outer(inv_freq, rest)
    others = np.concatenate([np.cos(angles), np.sin(angles)])
    rows = max(1, _PIECE // others.size)
    found = np.empty((len(turned), len(rest)))
    for start in range(0, len(turned), rows):
        np.matmul(turned[start : start + rows], others, out=found[start : start + rows])
    return found
