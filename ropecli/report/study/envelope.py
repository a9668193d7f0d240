"""The score over distance, thinned for an axis of some hundred points: lowest, mean and highest of each stretch.

A curve that turns every six tokens and is drawn by every tenth of them shows a wave that is not there; lowest and
highest hide none.
"""

from dataclasses import dataclass

import numpy as np

from ropecli.rope import ScaledRope
from ropecli.theory.distances import seen_distances
from ropecli.theory.score import score, score_grid

_STRETCHES = 500
_MOST = 1024
"""Distances that are looked at in a stretch; of a longer one so many, unevenly apart, stand for all."""
_AROUND = 8
"""Stretches on either side whose mean a line takes."""


@dataclass(frozen=True)
class Envelope:
    """Of stretches of `width` tokens: distances, the middles, tokens; low, mean, high: of the scores; NaN: masked."""

    width: int
    distances: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray

    def smooth(self) -> np.ndarray:
        """The mean over `reach_of` distances, over fewer towards 0, where the score falls off, and towards the end."""
        if self.width == 1:
            return self.mean
        places = np.arange(len(self.mean))
        around = np.minimum(places, _AROUND)
        first, last = places - around, np.minimum(places + around, len(places) - 1)
        masked = np.isnan(self.mean)
        sums, seen = (np.append(0, np.cumsum(one)) for one in (np.where(masked, 0, self.mean), ~masked))
        with np.errstate(invalid="ignore"):
            means = (sums[last + 1] - sums[first]) / (seen[last + 1] - seen[first])
        return np.where(masked, np.nan, means)


def width_of(stop: int, stretches: int = _STRETCHES) -> int:
    """Of a stretch, tokens."""
    return -(-stop // stretches)


def reach_of(stop: int) -> int:
    """Tokens over which `smooth` takes its mean; 1 where there are no more distances than points."""
    width = width_of(stop)
    return width * (2 * _AROUND + 1) if width > 1 else 1


def envelope(rope: ScaledRope, stop: int, target: int, stretches: int = _STRETCHES) -> Envelope:
    """Of the distances 0 to stop - 1, tokens, in up to so many stretches.

    Of a rope that remaps distances, the scores at those that the last of `target` tokens sees in place of the true
    ones, and none beyond.
    """
    width = width_of(stop, stretches)
    starts, steps = np.arange(0, stop, width), _steps(width)
    distances = starts[:, None] + steps
    values = _seen(rope, distances, target) if rope.remapping else score_grid(rope.inv_freq, starts, steps)
    masked = np.ma.masked_where(np.isnan(values) | (distances >= stop), values)
    low, mean, high = (of(axis=1).filled(np.nan) for of in (masked.min, masked.mean, masked.max))
    return Envelope(width, starts + (np.minimum(width, stop - starts) - 1) / 2, low, mean, high)


def _steps(width: int) -> np.ndarray:
    """From a stretch's start to the distances that are looked at."""
    if width <= _MOST:
        return np.arange(width)
    bounds = np.linspace(0, width, _MOST + 1).astype(np.int64)
    steps = np.random.default_rng(0).integers(bounds[:-1], bounds[1:])
    steps[0] = 0  # so that the last stretch has one, however short
    return steps


def _seen(rope: ScaledRope, distances: np.ndarray, target: int) -> np.ndarray:
    found, inside = np.full(distances.shape, np.nan), distances < target
    found[inside] = seen_distances(rope, target, distances[inside])
    # row by row, since all angles at once would take gigabytes
    return np.stack([score(rope.inv_freq, row) for row in found])
