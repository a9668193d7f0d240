"""Where a vector lies once it is turned: distances between its images at two positions, before and after scaling.

Source: Xiong et al. 2023 (arXiv:2309.16039), appendix B, "Problem Formulation" and "Embedding Granularity Metric". The
images are those of a unit vector with the same weight in every pair, so that distances go from 0 to 2. An attention
factor, which makes them longer, is left out.
"""

import math
from typing import NamedTuple

import numpy as np

from ropecli.analysis.score import LONGEST, scores

_PRODUCTS = 2**23
"""Pairs of positions that are compared, about: some tenths of a second at most."""
_FEWEST, _MOST = 64, 4096
"""Positions of a target that stand for all."""
_WIDEST = 2**18
"""Tokens of a pretraining window whose images are looked through."""
_BLOCK = 4096


class Closest(NamedTuple):
    """distance: between the two closest images. gap: how many tokens apart those are."""

    distance: float
    gap: int


def closest_images(inv_freq: np.ndarray, length: int) -> Closest:
    """q(f̂): the least distance between the images at two of `length` positions, which are two or more.

    The paper takes neighbours for the closest; this looks at every gap, up to 4 million tokens. (It calls q what one
    should prefer "the maximal value of": of several methods, the one that has the largest q.)
    """
    gap = 1 + int(scores(inv_freq, 1, min(length, LONGEST + 1)).argmax())
    return Closest(float(_apart(gap * inv_freq)), gap)


def distance_to_old_images(old: np.ndarray, new: np.ndarray, window: int, target: int) -> float:
    """d(f, f̂): how far the image farthest from all pretrained ones is from the nearest of them.

    old, new: inv_freq before and after; window, target: tokens before and after. As printed, with a minimum over both
    positions, it is 0 for every method: position 0 turns nothing. What is meant, and computed, is max over the new
    positions j of min over the old ones k of dist[f(x, k), f̂(x, j)]. Of long targets, positions evenly apart stand for
    all, with the last, so that the true maximum may be a little larger. NaN for windows above 262,144 tokens, which
    are not looked through.
    """
    if window > _WIDEST:
        return math.nan
    count = min(target, _MOST, max(_FEWEST, _PRODUCTS // window))
    places = np.unique(np.linspace(0, target - 1, count).round())
    nearest = _nearest(_images(new, places), old, window)
    return float(_apart(np.multiply.outer(places, new) - np.multiply.outer(nearest, old)).max())


def helix(inv_freq: np.ndarray, pair: int, positions: np.ndarray) -> np.ndarray:
    """(cos θ_0·t, sin θ_0·t, sin θ_pair·t), the paper's figure 8: shape (positions, 3).

    (Its text has the real part of the slower pair, its formula the sine.)
    """
    fast, slow = positions * inv_freq[0], positions * inv_freq[pair]
    return np.stack([np.cos(fast), np.sin(fast), np.sin(slow)], axis=-1)


def _nearest(images: np.ndarray, old: np.ndarray, window: int) -> np.ndarray:
    """The position, of `window` pretrained ones, whose image is nearest to each of `images`."""
    best, nearest = np.full(len(images), -np.inf), np.zeros(len(images))
    for start in range(0, window, _BLOCK):
        similar = images @ _images(old, np.arange(start, min(start + _BLOCK, window))).T
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
