"""Granularity: the paper's two figures, Theorem 1 on vectors of any kind, and what is wrong with both.

Distances between images, against every pair of complex vectors.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ropecli.analysis.granularity import closest_images, distance_to_old_images, exact_limit, granularity
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

BASE, ABF = 10_000.0, 500_000.0
LLAMA_2 = RopeGeometry(128, 128, BASE, 4096)
PI = scale(LLAMA_2, make_spec("linear", 4.0)).inv_freq
RAISED = scale(LLAMA_2, make_spec("abf", 4.0, {"beta": 50.0})).inv_freq

weights = st.floats(0.001, 100) | st.floats(-100, -0.001)


def images(x: np.ndarray, inv_freq: np.ndarray, position: int) -> np.ndarray:
    """f(x, t)_j = (x_2j + i·x_2j+1)·e^(iθ_j·t)."""
    return (x[::2] + 1j * x[1::2]) * np.exp(1j * inv_freq * position)


def sine(x: np.ndarray, inv_freq: np.ndarray, position: int) -> float:
    """Im⟨a, b⟩ / (‖a‖·‖b‖), as the paper has it."""
    a, b = images(x, inv_freq, position + 1), images(x, inv_freq, position)
    return float((a @ b.conj()).imag / (np.linalg.norm(a) * np.linalg.norm(b)))


def wide(inv_freq_of: float, alpha: float = 1.0) -> float:
    """At a million pairs."""
    return granularity(alpha * RopeGeometry(2 * 10**6, 2 * 10**6, inv_freq_of, 4096).inv_freq())


@pytest.mark.parametrize(("rope_theta", "alpha"), [(BASE, 1.0), (BASE, 0.25), (ABF, 1.0), (3.0, 1.0)])
def test_the_exact_limit(rope_theta, alpha):
    assert exact_limit(rope_theta, alpha) == pytest.approx(wide(rope_theta, alpha), rel=1e-5)


@given(arrays(np.float64, 128, elements=weights), st.integers(0, 100_000), st.sampled_from([PI, RAISED]))
def test_theorem_1_with_the_2_that_it_lacks(x, position, inv_freq):
    """2·min x_k²/‖x‖²·C_d and 2·max x_k²/‖x‖²·C_d: each sine is weighed by two squares."""
    total = math.fsum(np.sin(inv_freq))
    low, high = (2 * square / (x**2).sum() * total for square in ((x**2).min(), (x**2).max()))
    assert low * (1 - 1e-9) <= sine(x, inv_freq, position) + 1e-9
    assert sine(x, inv_freq, position) <= high * (1 + 1e-9) + 1e-9


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
    closest = closest_images(frequencies(method), length)
    assert closest.distance == pytest.approx(apart.min(), abs=1e-9)
    assert np.diagonal(apart, closest.gap) == pytest.approx(apart.min(), abs=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("target", [1, 256])
def test_the_distance_to_the_old_images(method, target):
    new, old = curve(frequencies(method), target), curve(SMALL.inv_freq(), 64)
    expected = distances(new, old).min(axis=1).max()
    assert distance_to_old_images(SMALL.inv_freq(), frequencies(method), 64, target) == pytest.approx(
        expected, abs=1e-9
    )
