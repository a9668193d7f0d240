"""Distances between images against every pair of complex vectors."""

import math

import numpy as np
import pytest

from ropecli.analysis.granularity import closest_images, distance_to_old_images
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import make_spec, scale

SMALL = RopeGeometry(32, 32, 10_000.0, 64)
METHODS = {"none": {}, "linear": {}, "ntk": {}, "abf": {"beta": 50.0}, "p-rope": {}}


def frequencies(method: str, factor: float = 4.0) -> np.ndarray:
    return scale(SMALL, make_spec(method, factor, METHODS[method])).inv_freq


def curve(inv_freq: np.ndarray, length: int) -> np.ndarray:
    """f(x, t) of a unit vector with the same weight in every pair, shape (length, pairs), complex."""
    return np.exp(1j * np.multiply.outer(np.arange(length), inv_freq)) / math.sqrt(len(inv_freq))


def distances(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.linalg.norm(first[:, None] - second[None], axis=-1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [2, 256])
def test_the_two_closest_images(method, length):
    images = curve(frequencies(method), length)
    apart = distances(images, images)
    np.fill_diagonal(apart, np.inf)
    distance, gap = closest_images(frequencies(method), length)
    assert distance == pytest.approx(apart.min(), abs=1e-9)
    assert np.diagonal(apart, gap) == pytest.approx(apart.min(), abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", [1, 256])
def test_the_distance_to_the_old_images(method, target):
    new, old = curve(frequencies(method), target), curve(SMALL.inv_freq(), 64)
    expected = distances(new, old).min(axis=1).max()
    assert distance_to_old_images(SMALL.inv_freq(), frequencies(method), 64, target) == pytest.approx(
        expected, abs=1e-9
    )
