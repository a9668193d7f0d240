"""The score of a query and a key of ones, as a function of distance, and the distances that attention sees.

Sources: Men et al. 2024 (arXiv:2405.14591), section 4, for the first negative score; Su et al. 2021
(arXiv:2104.09864), section 3.4.3, for the decay.
"""

import math

import numpy as np

from ropecli.scaling.spec import ScaledRope

FARTHEST_CHECKED = 2**22
"""The largest distance, tokens, up to which every distance is checked."""
_PIECE = 2**18
"""Multiplications per matrix product. OpenBLAS computes products of this size in one thread; on a busy machine, several
threads would wait for each other much longer than the work takes."""


def scores(inv_freq: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Σ_i 2·cos(mθ_i) at every distance m from start to stop - 1, shape (stop - start,). A million take about 20 ms.

    cos((a + b)θ) = cos aθ·cos bθ - sin aθ·sin bθ, so the scores of a grid of distances are one matrix product, which is
    computed in blocks of rows.
    """
    wide = math.isqrt(stop - start - 1) + 1
    firsts, rest = (np.multiply.outer(inv_freq, of) for of in (np.arange(start, stop, wide), np.arange(wide)))
    weights = np.concatenate([2 * np.cos(firsts), -2 * np.sin(firsts)]).T
    waves = np.concatenate([np.cos(rest), np.sin(rest)])
    rows = max(1, _PIECE // waves.size)
    product = np.empty((len(weights), wide))
    for row in range(0, len(weights), rows):
        np.matmul(weights[row : row + rows], waves, out=product[row : row + rows])
    return product.ravel()[: stop - start]


def first_negative(inv_freq: np.ndarray, longest: int = FARTHEST_CHECKED) -> int | None:
    """The first distance, tokens, with a negative score; None if there is none up to `longest`.

    From there on, a key similar to the query can get a lower score than a random key. Men et al. call this distance
    the longest context that the frequencies support.
    """
    if 2 * np.count_nonzero(inv_freq) <= len(inv_freq):  # pairs that do not rotate outweigh the others
        return None
    start, wide = 1, 4096
    while start <= longest:
        negative = np.flatnonzero(scores(inv_freq, start, min(start + wide, longest + 1)) < 0)
        if negative.size:
            return start + int(negative[0])
        start, wide = start + wide, 4 * wide
    return None


def mean_rotation(inv_freq: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """The inner product at each distance, tokens, of a query and a key with equal weight in every pair and norm 1.

    The mean of e^(imθ_i) over the pairs, complex, shape (distances,). Its real part is the score ÷ rotary_dim, its
    magnitude what remains at most, whatever the angle between them.
    """
    return np.exp(1j * np.multiply.outer(distances, inv_freq)).mean(axis=-1)


def largest_distance(rope: ScaledRope, target: int) -> int:
    """The largest distance ρ within `target` tokens, rounded down; target - 1 without a remapping.

    The last token, or the last one within the pretraining length, sees it at the first key of a branch.
    """
    if rope.remapping is None:
        return target - 1
    branches, last = rope.remapping.branches, np.array([min(rope.remapping.pretrained, target) - 1, target - 1])
    firsts = np.concatenate([branch.start(last)[branch.start(last) < branch.stop(last)] for branch in branches])
    return int(np.nanmax(rope.remapping.distances(last, firsts)))
