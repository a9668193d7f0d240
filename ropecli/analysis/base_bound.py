"""The smallest base that supports a context length, and the context length that a rope supports.

Source: Men et al. 2024, "Base of RoPE Bounds Context Length" (arXiv:2405.14591), section 4, eq. 8: the smallest b with
Σ_i cos(mθ_i) >= 0 at every distance m up to L. Below it, somewhere in the context, a key like the query can count for
less than one that is like nothing.
"""

import math
from typing import NamedTuple

import numpy as np

from ropecli.analysis.score import first_negative, largest_distance, scores
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScaledRope

LONGEST = 2**20
"""Tokens up to which the bound is looked for."""
_FINEST = 1e-4
_STEP = 0.01
_PRECISION = 1e-6
_GRID = 512
_KEPT = 60
_SHORTEST = 64
_LARGEST = 1e18
"""Heads of a few pairs need endless ones."""
_ZERO = 1e-9
"""A score that is no further below zero counts as none: what float64 leaves of a sum."""
_DOUBT = 1e-3
"""Of scores in float32, which one in float64 then decides."""


def smallest_base(geometry: RopeGeometry, length: int) -> float:
    """The bound for contexts of `length` tokens; infinite where it is above 1e18, NaN for more than a million tokens.

    For the geometry's pairs; its own base is not used. Takes a third of a second at 32k, more than one at 128k.

    The bases that satisfy it are no interval: at 2,048 tokens and d = 128 the first are 11,588 to 11,649, then all
    fail up to 12,418, and so on to 22,765, from where none fails for long. The paper's table agrees at 1k, 4k, 8k and
    32k. Its 1.6e4 at 2k holds, but is not the smallest, nor is its 7.8e6 at 128k (4.9e6). Its 3.1e5 at 16k does not
    hold, nor does any base that rounds to it; the smallest is 2.3e5.

    Steps turn no pair by more than a hundredth of a radian at `length`, or are 0.01% of a base; an interval that is
    narrower can be missed.
    """
    if length > LONGEST:
        return math.nan
    if 2 * geometry.still_pairs >= geometry.pairs:  # the others cannot outweigh them
        return 1.0
    # a base that fails at some length fails at all longer ones: each search begins where a shorter one ended
    logarithm, reached = 0.0, min(_SHORTEST, length)
    while True:
        logarithm = _Search(geometry, reached).run(logarithm)
        if reached == length or logarithm == math.inf:
            return math.exp(logarithm)
        reached = min(2 * reached, length)


class Support(NamedTuple):
    """needed: the largest distance asked for, tokens. supported: the largest before the first negative score, None
    where there is none as far as is looked. smallest_base: of `needed`, infinite where no base would do; None where it
    was not worked out.
    """

    needed: int
    supported: int | None
    smallest_base: float | None

    @property
    def falls_short(self) -> bool:
        return self.supported is not None and self.supported < self.needed


def support_of(rope: ScaledRope, target: int, longest: int, *, always: bool = False) -> Support:
    """Of a rope that is to read `target` tokens.

    longest: tokens up to which the smallest base is worked out; where the rope has no need of it, only if `always`.
    """
    needed = target if rope.remapping is None else largest_distance(rope, target)
    negative = first_negative(rope.inv_freq)
    found = Support(needed, None if negative is None else negative - 1, None)
    if needed <= longest and (always or found.falls_short):
        return found._replace(smallest_base=smallest_base(rope.geometry, needed))
    return found


class _Search:
    """Goes up through the bases. Distances that refused one, the witnesses, refuse most of its neighbours too."""

    def __init__(self, geometry: RopeGeometry, length: int) -> None:
        self.length = length
        self.still = geometry.still_pairs
        self.exponents = (np.arange(0, geometry.rotary_dim, 2) / geometry.rotary_dim)[: geometry.pairs - self.still]
        self.witnesses: list[int] = []

    def run(self, logarithm: float) -> float:
        """ln b of the smallest base from e^logarithm on."""
        while logarithm < math.log(_LARGEST):
            grid = logarithm + self._step(logarithm) * np.arange(_GRID)
            found = self._first(np.exp(-np.multiply.outer(grid, self.exponents)))
            if found is not None:
                return self._narrow(float(grid[max(0, found - 1)]), float(grid[found]))
            logarithm = float(grid[-1])
        return math.inf

    def _narrow(self, failing: float, holding: float) -> float:
        """ln b of the smallest base that holds, between two neighbours of the grid."""
        while holding - failing > _PRECISION:
            middle = (failing + holding) / 2
            if self._negative(np.exp(-middle * self.exponents)) is None:
                holding = middle
            else:
                failing = middle
        return holding

    def _step(self, logarithm: float) -> float:
        """So that no pair's angle at the largest distance moves by more than a small part of a turn."""
        fastest = (self.length * np.exp(-logarithm * self.exponents) * self.exponents).max(initial=0.0)
        return float(min(_STEP, max(_FINEST, _STEP / max(fastest, _FINEST))))

    def _first(self, rows: np.ndarray) -> int | None:
        """The first row of frequencies, shape (bases, pairs), whose scores are nowhere negative."""
        alive = np.ones(len(rows), dtype=bool)
        useful = [witness for witness in self.witnesses if self._refuse(rows, alive, witness)]
        self.witnesses = (useful + [one for one in self.witnesses if one not in useful])[:_KEPT]
        for index, inv_freq in enumerate(rows):
            if not alive[index]:
                continue
            negative = self._negative(inv_freq)
            if negative is None:
                return index
            self.witnesses.insert(0, negative)
            self._refuse(rows, alive, negative)
            alive[index] = False
        return None

    def _refuse(self, rows: np.ndarray, alive: np.ndarray, distance: int) -> bool:
        """Strikes out the rows whose score at the distance is negative. Whether there was one."""
        left = np.flatnonzero(alive)
        turns = rows[left] * (distance / (2 * math.pi))
        turns -= np.rint(turns)  # float32 has no digits left for many turns, and is ten times as fast
        score = np.cos(np.float32(2 * math.pi) * turns.astype(np.float32)).sum(axis=1) + self.still
        alive[left[score < -_DOUBT]] = False
        return bool((score < -_DOUBT).any())

    def _negative(self, inv_freq: np.ndarray) -> int | None:
        """The distance of the lowest score among those of the farthest block that has a negative one."""
        stop, wide = self.length + 1, 8192
        while stop > 0:
            start = max(0, stop - wide)
            found = scores(inv_freq, start, stop) / 2 + self.still
            lowest = int(found.argmin())
            if found[lowest] < -_ZERO:
                return start + lowest
            stop, wide = start, 2 * wide
        return None
