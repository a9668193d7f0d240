"""How well positions are told apart: the angle between neighbours, and distances between rotated vectors (images).

Source: Xiong et al. 2023 (arXiv:2309.16039), appendix B: Theorem 1, "Problem Formulation" and "Embedding Granularity
Metric". Its ABF is `abf` with beta, its PI `linear` with alpha = 1/factor; here the frequencies are given as inv_freq,
whatever the method. Logarithms are natural. The images are those of a unit vector with the same weight in every pair,
so that distances go from 0 to 2. An attention factor, which makes them longer, is left out.
"""

import math
from typing import NamedTuple

import numpy as np

from ropecli.analysis.decay import exponential_integral
from ropecli.analysis.score import LONGEST, scores

_PRODUCTS = 2**23
"""Pairs of positions that are compared, about: some tenths of a second at most."""
_FEWEST, _MOST = 64, 4096
"""Positions of a target that stand for all."""
_LONGEST_COMPARED = 2**18
"""Tokens of a pretraining length whose images are all compared."""
_BLOCK = 4096


def granularity(inv_freq: np.ndarray) -> float:
    """C_d/(d/2), the mean of sin θ_j: the sine of the angle between consecutive images of a vector of ones.

    The paper's C_d is the sum, for which it gives the limits 1/(ln b + ln β) and α/ln b. A sum of d/2 terms grows
    with d; the limits are those of the mean (the closed forms are right, their limits leave out the factor 2/d).
    Theorem 1 bounds the sine by min x_k²/‖x‖²·C_d and max x_k²/‖x‖²·C_d. Each sine is weighed by two squares, so that
    both lack a factor 2: the lower bound is right but loose, the upper one wrong.
    """
    return float(np.sin(inv_freq).mean())


def granularity_limit(rope_theta: float, alpha: float = 1.0) -> float:
    """α/ln b, what the paper takes for the limit of C_d/(d/2) as d grows: 0.027 at α = 1/4, b = 10,000, and 0.076 at
    b = 500,000. Good for small α: `exact_limit` is 5% less at α = 1.
    """
    return alpha / math.log(rope_theta)


def exact_limit(rope_theta: float, alpha: float = 1.0) -> float:
    """lim C_d/(d/2) = (Si(α) - Si(α/b)) / ln b.

    The paper's bounds on it, (α/ln b)·((b - 1)/b - (α/π)(b² - 1)/b²) and (α/ln b)·(b - 1)/b, hold; the square's sum
    has the limit (b² - 1)/(2b²·ln b), so that the lower one may have 2π for π.
    """
    near, far = exponential_integral(np.array([alpha / rope_theta, alpha]))
    return float((near - far).imag / math.log(rope_theta))


class ClosestImages(NamedTuple):
    """distance: between the two closest images. gap: how many tokens apart those are."""

    distance: float
    gap: int


def closest_images(inv_freq: np.ndarray, length: int) -> ClosestImages:
    """q(f̂): the least distance between the images at two of `length` positions, which are two or more.

    The paper takes neighbours for the closest; this looks at every gap, up to 4 million tokens. (It calls q what one
    should prefer "the maximal value of": of several methods, the one that has the largest q.)
    """
    gap = 1 + int(scores(inv_freq, 1, min(length, LONGEST + 1)).argmax())
    return ClosestImages(float(_apart(gap * inv_freq)), gap)


def distance_to_old_images(old: np.ndarray, new: np.ndarray, original_length: int, target: int) -> float:
    """d(f, f̂): how far the image farthest from all pretrained ones is from the nearest of them.

    old, new: inv_freq before and after. original_length, target: tokens before and after.

    As printed, with a minimum over both positions, it is 0 for every method: position 0 rotates nothing. What is meant,
    and computed, is max over the new positions j of min over the old ones k of dist[f(x, k), f̂(x, j)]. Of long targets,
    positions evenly apart stand for all, with the last, so that the true maximum may be a little larger. NaN for
    pretraining lengths above 262,144 tokens, whose images are too many to compare.
    """
    if original_length > _LONGEST_COMPARED:
        return math.nan
    count = min(target, _MOST, max(_FEWEST, _PRODUCTS // original_length))
    places = np.unique(np.linspace(0, target - 1, count).round())
    nearest = _nearest(_images(new, places), old, original_length)
    return float(_apart(np.multiply.outer(places, new) - np.multiply.outer(nearest, old)).max())


def helix(inv_freq: np.ndarray, pair: int, positions: np.ndarray) -> np.ndarray:
    """(cos θ_0·t, sin θ_0·t, sin θ_pair·t), the paper's figure 8: shape (positions, 3).

    (Its text has the real part of the slower pair, its formula the sine.)
    """
    fast, slow = positions * inv_freq[0], positions * inv_freq[pair]
    return np.stack([np.cos(fast), np.sin(fast), np.sin(slow)], axis=-1)


def _nearest(images: np.ndarray, old: np.ndarray, original_length: int) -> np.ndarray:
    """The position, of `original_length` pretrained ones, whose image is nearest to each of `images`."""
    best, nearest = np.full(len(images), -np.inf), np.zeros(len(images))
    for start in range(0, original_length, _BLOCK):
        similar = images @ _images(old, np.arange(start, min(start + _BLOCK, original_length))).T
        found = similar.argmax(axis=1)
        highest = similar[np.arange(len(images)), found]
        nearest = np.where(highest > best, start + found, nearest)
        best = np.maximum(best, highest)
    return nearest


def _images(inv_freq: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Shape (positions, rotary_dim); a product of two is the sum of their cosines."""
    angles = np.multiply.outer(positions, inv_freq)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def _apart(angles: np.ndarray) -> np.ndarray:
    """√(2 - 2·mean cos) of the angles between two images by pair, the last axis, without the digits that this loses."""
    return 2 * np.sqrt((np.sin(angles / 2) ** 2).mean(axis=-1))
