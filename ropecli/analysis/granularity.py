"""Two measures of how far positions are apart: angles of neighbours, and distances of rotated vectors (images).

Source: Xiong et al. 2023 (arXiv:2309.16039), appendix B: Theorem 1, "Problem Formulation" and "Embedding Granularity
Metric". The paper's ABF is `abf` with beta, its PI is `linear` with alpha = 1/factor; the functions here take inv_freq,
so any method works. Logarithms are natural. Images are of a unit vector with equal weight in every pair, so
distances range from 0 to 2. The attention factor, which lengthens images, is ignored.
"""

import math

import numpy as np

from ropecli.analysis.score import FARTHEST_CHECKED, scores

_PRODUCTS = 2**23
"""Approximate limit on the compared pairs of positions; takes a few tenths of a second."""
_FEWEST, _MOST = 64, 4096
"""Limits on the number of sampled target positions."""
_LONGEST_COMPARED = 2**18
"""The longest pretraining length, tokens, for which all images are compared."""
_BLOCK = 4096


def granularity(inv_freq: np.ndarray) -> float:
    """C_d/(d/2), the mean of sin θ_j: the sine of the angle between consecutive images of a vector of ones.

    The paper's C_d is the sum, but its limits 1/(ln b + ln β) and α/ln b are those of the mean. Both bounds of its
    Theorem 1 lack a factor 2, so the upper one is wrong.
    """
    return float(np.sin(inv_freq).mean())


def closest_images(inv_freq: np.ndarray, length: int) -> tuple[float, int]:
    """q(f̂): the smallest distance between the images of two positions below `length`, which is at least 2; their gap.

    The paper assumes that neighbours are closest; this checks every gap up to 4 million tokens. A larger q is better.
    """
    gap = 1 + int(scores(inv_freq, 1, min(length, FARTHEST_CHECKED + 1)).argmax())
    return float(_apart(gap * inv_freq)), gap


def distance_to_old_images(old: np.ndarray, new: np.ndarray, original_length: int, target: int) -> float:
    """d(f, f̂): the largest distance from a new image to its nearest pretrained image.

    old, new: inv_freq before and after. original_length, target: tokens before and after.

    The paper prints a minimum over both positions, which is 0 for every method, because position 0 is not rotated. This
    computes max over new positions j of min over old positions k of dist[f(x, k), f̂(x, j)]. Long targets are sampled
    evenly, including the last position, so the true maximum may be slightly larger. NaN for pretraining lengths above
    262,144 tokens, which would take too long.
    """
    if original_length > _LONGEST_COMPARED:
        return math.nan
    count = min(target, _MOST, max(_FEWEST, _PRODUCTS // original_length))
    places = np.unique(np.linspace(0, target - 1, count).round())
    nearest = _nearest(_images(new, places), old, original_length)
    return float(_apart(np.multiply.outer(places, new) - np.multiply.outer(nearest, old)).max())


def _nearest(images: np.ndarray, old: np.ndarray, original_length: int) -> np.ndarray:
    """For each of `images`, the position below `original_length` with the nearest pretrained image."""
    best, nearest = np.full(len(images), -np.inf), np.zeros(len(images))
    for start in range(0, original_length, _BLOCK):
        similar = images @ _images(old, np.arange(start, min(start + _BLOCK, original_length))).T
        index = similar.argmax(axis=1)
        highest = similar[np.arange(len(images)), index]
        nearest = np.where(highest > best, start + index, nearest)
        best = np.maximum(best, highest)
    return nearest


def _images(inv_freq: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Images, shape (positions, rotary_dim); the inner product of two is the sum of cos of their angles."""
    angles = np.multiply.outer(positions, inv_freq)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def _apart(angles: np.ndarray) -> np.ndarray:
    """Distance of two images from their angles, last axis (pairs): √(2 - 2·mean cos), computed without cancellation."""
    return 2 * np.sqrt((np.sin(angles / 2) ** 2).mean(axis=-1))
