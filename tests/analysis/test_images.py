"""Distances between images, held against every pair of complex vectors."""

import math

import numpy as np
import pytest

from ropecli.analysis.granularity import closest_images, distance_to_old_images, granularity
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

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
    found = closest_images(frequencies(method), length)
    assert found.distance == pytest.approx(apart.min(), abs=1e-9)
    assert np.diagonal(apart, found.gap) == pytest.approx(apart.min(), abs=1e-9)


def test_they_need_not_be_neighbours():
    """The paper's own doubt: few pairs turn nearly full circle, and come closer to older images than to neighbours."""
    inv_freq = np.array([1.0, 0.001])
    images = curve(inv_freq, 100)
    apart = distances(images, images)
    np.fill_diagonal(apart, np.inf)
    found = closest_images(inv_freq, 100)
    assert found.gap == 44  # seven turns but for 0.018 of a radian
    assert found.distance == pytest.approx(apart.min())
    assert found.distance < np.diagonal(apart, 1).min() / 10
    assert closest_images(np.array([1.0]), 1000).gap == 710  # 113 turns, to five digits


def test_neighbours_are_closest_at_llama_2s_width():
    for rope_theta in (1e4, 5e5):
        assert closest_images(RopeGeometry(128, 128, rope_theta, 4096).inv_freq(), 32768).gap == 1


def test_the_paper_prefers_what_has_the_larger_q():
    """q of ABF with β = 50 is above that of PI with α = 1/4; so is their granularity."""
    geometry = RopeGeometry(128, 128, 10_000.0, 4096)
    pi, abf = geometry.inv_freq() / 4, geometry.inv_freq(5e5)
    assert closest_images(abf, 16384).distance > 2 * closest_images(pi, 16384).distance
    assert granularity(abf) > 2 * granularity(pi)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", [1, 256])
def test_the_distance_to_the_old_images(method, target):
    new, old = curve(frequencies(method), target), curve(SMALL.inv_freq(), 64)
    expected = distances(new, old).min(axis=1).max()
    assert distance_to_old_images(SMALL.inv_freq(), frequencies(method), 64, target) == pytest.approx(
        expected, abs=1e-9
    )


def test_as_printed_it_is_nothing():
    """The printed minimum is over both positions, and position 0 turns nothing, by any method."""
    old = curve(SMALL.inv_freq(), 64)
    for method in METHODS:
        assert distances(curve(frequencies(method), 256), old).min() == 0


def test_interpolation_stays_near():
    """PI's images lie between those of two old positions: at most half a step from one."""
    found = distance_to_old_images(SMALL.inv_freq(), frequencies("linear"), 64, 253)
    half_a_step = curve(SMALL.inv_freq() / 2, 2)
    assert found == pytest.approx(np.linalg.norm(half_a_step[1] - half_a_step[0]))
    assert distance_to_old_images(SMALL.inv_freq(), frequencies("none"), 64, 253) > 2 * found
