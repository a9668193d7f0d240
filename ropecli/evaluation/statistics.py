"""Intervals of means over samples, and the types of measured numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Interval

_RESAMPLES = 1000
_PICKED_AT_ONCE = 2**20
"""Samples, to bound the memory."""
_NORMAL = 1.959964
_FEW = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060)
LARGEST_NLL = 700.0
"""Nats; exp of anything larger overflows float64."""

# The limits are checked by pydantic when a report is read back, and only then.
TokenCount = Annotated[int, Interval(gt=0, le=10**12)]
Count = Annotated[int, Interval(ge=0, le=10**18)]
Amount = Annotated[float, Interval(ge=0, le=1e15)]
Fraction = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True)
class Bucket:
    """Scored tokens with start ≤ distance < stop tokens. nll: mean loss, nats."""

    start: TokenCount
    stop: Annotated[int, Interval(gt=1, le=10**12)]
    tokens: TokenCount
    nll: float


Ends = tuple[float, float] | tuple[None, None]
"""The ends of an interval, or none."""


def bootstrap_interval(sums: np.ndarray, weights: np.ndarray, passes: Sequence[int] = ()) -> Ends:
    """95% bootstrap interval of exp(Σ sums / Σ weights) over samples; None for fewer than two with weight.

    sums, weights: shape (samples,). passes: see `ratio_interval`.
    """
    low, high = ratio_interval(sums, weights, passes)
    if low is None or high is None:
        return None, None
    return math.exp(min(low, LARGEST_NLL)), math.exp(min(high, LARGEST_NLL))


def ratio_interval(sums: np.ndarray, weights: np.ndarray, passes: Sequence[int] = ()) -> Ends:
    """95% bootstrap interval of Σ sums / Σ weights over samples; None for fewer than two with weight.

    sums, weights: shape (samples,); a weight may be negative. passes: the pass of each sample, if one pass reads
    several: then passes are resampled too, and the wider interval is returned. Percentiles from few samples are too
    narrow. They are widened by the ratio of Student's t to the normal distribution, the idea of the expanded percentile
    interval (Hesterberg 2015, arXiv:1411.5279).
    """
    if len(passes):
        places = np.unique(passes, return_inverse=True)[1]
        of_samples = ratio_interval(sums, weights)
        of_passes = ratio_interval(np.bincount(places, sums), np.bincount(places, weights))
        return max(of_samples, of_passes, key=_width)
    sums, weights = sums[weights != 0], weights[weights != 0]
    samples = len(sums)
    if samples < 2:
        return None, None
    centre = sums.sum() / weights.sum()
    ends = np.quantile(_resampled_means(sums, weights), (0.025, 0.975)) - centre
    wider = math.sqrt(samples / (samples - 1)) * _student_t(samples - 1) / _NORMAL
    low, high = centre + wider * ends
    return float(low), float(high)


def _width(ends: Ends) -> float:
    return math.inf if ends[0] is None or ends[1] is None else ends[1] - ends[0]


def _resampled_means(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Σ sums / Σ weights of samples drawn with replacement, with a fixed seed; shape (resamples,)."""
    random, samples = np.random.default_rng(0), len(sums)
    at_once = max(1, _PICKED_AT_ONCE // samples)
    means = []
    for start in range(0, _RESAMPLES, at_once):
        picks = random.integers(0, samples, (min(at_once, _RESAMPLES - start), samples))
        means.append(sums[picks].sum(axis=1) / weights[picks].sum(axis=1))
    return np.concatenate(means)


def _student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t, from a table or the Cornish-Fisher expansion, to four digits."""
    if freedom <= len(_FEW):
        return _FEW[freedom - 1]
    z, n = _NORMAL, float(freedom)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def wilson(hits: float, trials: int) -> tuple[float, float]:
    """Wilson score interval (95%) of a proportion; not empty even if all trials are hits (Wilson 1927)."""
    share, correction = hits / trials, _NORMAL * _NORMAL / trials
    middle = (share + correction / 2) / (1 + correction)
    half = _NORMAL / (1 + correction) * math.sqrt(share * (1 - share) / trials + correction / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def score_difference(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean of paired differences of scores, and its 95% interval; not empty even if all are equal.

    differences: shape (samples,), -1 to 1. Adds half an observation to each of the four outcomes of a pair (Agresti and
    Min 2005, doi:10.1002/sim.1781).
    """
    samples, total = len(differences) + 2, float(differences.sum())
    middle = total / samples
    half = _NORMAL * math.sqrt((float((differences**2).sum()) + 1) / samples - middle**2) / math.sqrt(samples)
    return total / len(differences), max(-1.0, middle - half), min(1.0, middle + half)
