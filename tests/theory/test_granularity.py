"""Granularity: the paper's two figures, Theorem 1 on vectors of any kind, and what is wrong with both."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import scale
from ropecli.theory.granularity import exact_limit, granularity, granularity_limit, sine_similarity

BASE, ABF = 10_000.0, 500_000.0
LLAMA_2 = RopeGeometry(128, 128, BASE, 4096)
PI = scale(LLAMA_2, ScalingSpec("linear", 4.0)).inv_freq
RAISED = scale(LLAMA_2, ScalingSpec("abf", 4.0, {"beta": 50.0})).inv_freq

weights = st.floats(0.001, 100) | st.floats(-100, -0.001)


def images(x: np.ndarray, inv_freq: np.ndarray, position: int) -> np.ndarray:
    """f(x, t)_j = (x_2j + i·x_2j+1)·e^(iθ_j·t)."""
    return (x[::2] + 1j * x[1::2]) * np.exp(1j * inv_freq * position)


def sine(x: np.ndarray, inv_freq: np.ndarray, position: int, gap: int = 1) -> float:
    """Im⟨a, b⟩ / (‖a‖·‖b‖), as the paper has it."""
    a, b = images(x, inv_freq, position + gap), images(x, inv_freq, position)
    return float((a @ b.conj()).imag / (np.linalg.norm(a) * np.linalg.norm(b)))


def wide(inv_freq_of: float, alpha: float = 1.0) -> float:
    """At a million pairs."""
    return granularity(alpha * RopeGeometry(2 * 10**6, 2 * 10**6, inv_freq_of, 4096).inv_freq())


def test_the_papers_two_figures():
    assert granularity_limit(BASE, 1 / 4) == pytest.approx(0.027, abs=5e-4)
    assert granularity_limit(50 * BASE) == pytest.approx(0.076, abs=5e-4)


def test_what_they_are_at_llama_2s_width():
    assert granularity(PI) == pytest.approx(0.02902, abs=1e-5)
    assert granularity(RAISED) == pytest.approx(0.07882, abs=1e-5)
    by_hand = math.fsum(math.sin(BASE ** (-2 * j / 128) / 4) for j in range(64)) / 64
    assert granularity(PI) == pytest.approx(by_hand, rel=1e-12)


def test_the_second_frequency_moves_by_six_percent():
    assert RAISED[1] / LLAMA_2.inv_freq()[1] == pytest.approx(0.94, abs=0.005)


@pytest.mark.parametrize(("rope_theta", "alpha"), [(BASE, 1.0), (BASE, 0.25), (ABF, 1.0), (3.0, 1.0)])
def test_the_exact_limit(rope_theta, alpha):
    assert exact_limit(rope_theta, alpha) == pytest.approx(wide(rope_theta, alpha), rel=1e-5)


def test_the_exact_limit_is_a_sine_integral():
    mpmath = pytest.importorskip("mpmath")
    expected = (mpmath.si(0.25) - mpmath.si(0.25 / BASE)) / mpmath.log(BASE)
    assert exact_limit(BASE, 0.25) == pytest.approx(float(expected), rel=1e-12)


def test_the_papers_limit_is_good_for_small_alpha():
    assert exact_limit(BASE, 1.0) / granularity_limit(BASE, 1.0) == pytest.approx(0.946, abs=5e-4)
    assert exact_limit(BASE, 0.25) / granularity_limit(BASE, 0.25) == pytest.approx(1, abs=0.004)


@pytest.mark.parametrize(("rope_theta", "alpha"), [(2.0, 1.0), (BASE, 0.01), (BASE, 0.25), (BASE, 1.0), (ABF, 1.0)])
def test_the_papers_bounds_on_the_limit(rope_theta, alpha):
    limit, first = exact_limit(rope_theta, alpha), alpha / math.log(rope_theta)
    linear, square = (rope_theta - 1) / rope_theta, alpha / math.pi * (rope_theta**2 - 1) / rope_theta**2
    assert first * (linear - square) <= limit <= first * linear
    assert first * (linear - square / 2) <= limit  # and half of the square's part is enough


def test_the_sum_grows_with_the_width_and_its_mean_does_not():
    """The paper gives the sum the limit of the mean."""
    widths = (128, 1280, 12800)
    tables = [RopeGeometry(width, width, BASE, 4096).inv_freq() for width in widths]
    sums = [math.fsum(np.sin(table)) for table in tables]
    assert sums[0] == pytest.approx(7, abs=0.01)  # where 1/ln b is 0.109
    assert sums[1] / sums[0] == pytest.approx(10, rel=0.1)
    assert sums[2] / sums[1] == pytest.approx(10, rel=0.01)
    means = [granularity(table) for table in tables]
    assert means == [pytest.approx(one / (width / 2)) for one, width in zip(sums, widths, strict=True)]
    assert means[2] == pytest.approx(exact_limit(BASE), rel=1e-3)


@pytest.mark.parametrize("power", [1, 2])
def test_the_limits_of_the_geometric_sums(power):
    """Σ α^p·b^(-2pj/d) over d/2 has (b^p - 1)/(p·b^p·ln b): the paper leaves out the mean, and for the square the 2."""
    frequencies = RopeGeometry(2 * 10**6, 2 * 10**6, BASE, 4096).inv_freq() ** power
    expected = (BASE**power - 1) / (power * BASE**power * math.log(BASE))
    assert frequencies.mean() == pytest.approx(expected, rel=1e-5)


@given(arrays(np.float64, 128, elements=weights), st.integers(0, 100_000), st.sampled_from([PI, RAISED]))
def test_theorem_1_with_the_2_that_it_lacks(x, position, inv_freq):
    """2·min x_k²/‖x‖²·C_d and 2·max x_k²/‖x‖²·C_d: each sine is weighed by two squares."""
    total = math.fsum(np.sin(inv_freq))
    low, high = (2 * one / (x**2).sum() * total for one in ((x**2).min(), (x**2).max()))
    assert low * (1 - 1e-9) <= sine(x, inv_freq, position) + 1e-9
    assert sine(x, inv_freq, position) <= high * (1 + 1e-9) + 1e-9


@given(arrays(np.float64, 128, elements=weights), st.integers(0, 1000), st.integers(1, 50))
def test_the_sine_is_that_of_the_images_at_every_position(x, position, gap):
    assert sine_similarity(PI, x, gap) == pytest.approx(sine(x, PI, position, gap), abs=1e-9)


def test_theorem_1_as_printed_fails():
    """For a vector of ones the sine is twice the upper bound; its lower bound holds, with half to spare."""
    ones = np.ones(128)
    printed = (ones**2).max() / (ones**2).sum() * math.fsum(np.sin(RAISED))
    assert sine(ones, RAISED, 5) == pytest.approx(2 * printed)


def test_of_ones_it_is_the_granularity():
    assert sine_similarity(PI, np.ones(128)) == pytest.approx(granularity(PI), rel=1e-12)


def test_what_does_not_turn_has_none():
    assert granularity(np.zeros(4)) == 0
