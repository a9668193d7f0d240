"""The smallest base that supports a context length, and the context length that a rope supports.

Source: Men et al. 2024, "Base of RoPE Bounds Context Length" (arXiv:2405.14591), section 4, eq. 8: the smallest b with
Σ_i cos(mθ_i) >= 0 at every distance m up to L. With a smaller base, at some distance, a key similar to the query can
get a lower score than a random key.
"""

import math

import numpy as np

from ropecli.analysis.score import scores
from ropecli.rope import RopeGeometry

LONGEST_BOUNDED = 2**20
"""The longest context, tokens, for which the bound is computed."""
_FINEST = 1e-4
_STEP = 0.01
_PRECISION = 1e-6
_GRID = 512
_SHORTEST = 64
_LARGEST = 1e18
"""The largest base tried; heads of a few pairs would need far larger ones."""
_ZERO = 1e-9
"""Tolerance: scores down to -_ZERO count as zero, because of float64 rounding."""


def smallest_base(geometry: RopeGeometry, length: int) -> float:
    """The smallest base that supports `length` tokens; infinite if above 1e18.

    Uses the geometry's pairs, not its base. Takes 0.3 seconds at 32k, more than one second at 128k.

    The bases that satisfy eq. 8 do not form one interval. The paper's table agrees at 1k, 4k, 8k and 32k. Its 1.6e4 at
    2k and 7.8e6 at 128k satisfy the bound but are not the smallest (11,588 and 4.9e6). Its 3.1e5 at 16k does not; the
    smallest is 2.3e5.

    A search step rotates no pair by more than 0.01 radian at `length`, or changes the base by 0.01%. Narrower intervals
    can be missed.
    """
    if 2 * geometry.still_pairs >= geometry.pairs:  # the others cannot outweigh them
        return 1.0
    # a base that fails at one length fails at all longer ones, so each search starts where the shorter one ended
    logarithm, reached = 0.0, min(_SHORTEST, length)
    while True:
        logarithm = _Search(geometry, reached).run(logarithm)
        if reached == length or logarithm == math.inf:
            return math.exp(logarithm)
        reached = min(2 * reached, length)


class _Search:
    """An upward search through the bases."""

    def __init__(self, geometry: RopeGeometry, length: int) -> None:
        self.length = length
        self.still = geometry.still_pairs
        self.exponents = (np.arange(0, geometry.rotary_dim, 2) / geometry.rotary_dim)[: geometry.pairs - self.still]

    def run(self, logarithm: float) -> float:
        """ln b of the smallest base b >= e^logarithm that holds."""
        while logarithm < math.log(_LARGEST):
            grid = logarithm + self._step(logarithm) * np.arange(_GRID)
            first = self._first(np.exp(-np.multiply.outer(grid, self.exponents)))
            if first is None:
                logarithm = float(grid[-1])
                continue
            failing, holding = float(grid[max(0, first - 1)]), float(grid[first])
            while holding - failing > _PRECISION:
                middle = (failing + holding) / 2
                if self._negative(np.exp(-middle * self.exponents)) is None:
                    holding = middle
                else:
                    failing = middle
            return holding
        return math.inf

    def _step(self, logarithm: float) -> float:
        """The step in ln b, chosen so that no pair's angle at the largest distance changes much."""
        fastest = (self.length * np.exp(-logarithm * self.exponents) * self.exponents).max(initial=0.0)
        return float(min(_STEP, max(_FINEST, _STEP / max(fastest, _FINEST))))

    def _first(self, rows: np.ndarray) -> int | None:
        """Index of the first row of frequencies, shape (bases, pairs), without a negative score."""
        alive = np.ones(len(rows), dtype=bool)
        while alive.any():
            index = int(alive.argmax())
            negative = self._negative(rows[index])
            if negative is None:
                return index
            # most nearby bases fail at the same distance
            alive &= np.cos(negative * rows).sum(axis=1) + self.still >= -_ZERO
            alive[index] = False
        return None

    def _negative(self, inv_freq: np.ndarray) -> int | None:
        """The distance of the lowest score in the farthest block with a negative score; None if there is none."""
        stop, wide = self.length + 1, 8192
        while stop > 0:
            start = max(0, stop - wide)
            sums = scores(inv_freq, start, stop) / 2 + self.still
            lowest = int(sums.argmin())
            if sums[lowest] < -_ZERO:
                return start + lowest
            stop, wide = start, 2 * wide
        return None
