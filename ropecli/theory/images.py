"""Where a vector lies once it is turned: distances between its images at two positions, before and after scaling.

Source: Xiong et al. 2023 (arXiv:2309.16039), appendix B, "Problem Formulation" and "Embedding Granularity Metric". The
images are those of a unit vector with the same weight in every pair, so that distances go from 0 to 2. An attention
factor, which makes them longer, is left out.
"""

from typing import NamedTuple

import numpy as np

from ropecli.theory.score import scores

_PRODUCTS = 2**23
"""Pairs of positions that are looked at, at most: some hundredths of a second."""
_BLOCK = 256


class Granularity(NamedTuple):
    """distance: between the two closest images. gap: how many tokens apart those are."""

    distance: float
    gap: int


def closest_images(inv_freq: np.ndarray, length: int) -> Granularity:
    """q(f̂): the least distance between the images at two of `length` positions, which are two or more.

    The paper takes neighbours for the closest; this looks at every gap. (It calls q what one should prefer "the
    maximal value of": of several methods, the one that has the largest q.)
    """
    similar = scores(inv_freq, 1, length) / (2 * len(inv_freq))
    closest = int(similar.argmax())
    return Granularity(_apart(similar[closest]), closest + 1)


def distance_to_old_images(old: np.ndarray, new: np.ndarray, window: int, target: int) -> float:
    """d(f, f̂): how far the image farthest from all pretrained ones is from the nearest of them.

    old, new: inv_freq before and after; window, target: tokens before and after. As printed, with a minimum over both
    positions, it is 0 for every method: position 0 turns nothing. What is meant, and computed, is max over the new
    positions j of min over the old ones k of dist[f(x, k), f̂(x, j)]. Of long targets, positions evenly apart stand for
    all, with the last.
    """
    count = min(target, max(64, _PRODUCTS // window))
    places = np.unique(np.linspace(0, target - 1, count).round())
    images, known = _images(new, places), _images(old, np.arange(window))
    farthest = min(
        float((images[start : start + _BLOCK] @ known.T).max(axis=1).min()) for start in range(0, len(places), _BLOCK)
    )
    return _apart(farthest / len(old))


def helix(inv_freq: np.ndarray, pair: int, positions: np.ndarray) -> np.ndarray:
    """(cos θ_0·t, sin θ_0·t, sin θ_pair·t), the paper's figure 8: shape (positions, 3).

    (Its text has the real part of the slower pair, its formula the sine, which the figure shows.)
    """
    fast, slow = positions * inv_freq[0], positions * inv_freq[pair]
    return np.stack([np.cos(fast), np.sin(fast), np.sin(slow)], axis=-1)


def _images(inv_freq: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Shape (positions, rotary_dim); a product of two is the sum of their cosines."""
    angles = np.multiply.outer(positions, inv_freq)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def _apart(similarity: float) -> float:
    """Between unit vectors of this inner product."""
    return float(np.sqrt(max(0.0, 2 - 2 * similarity)))
