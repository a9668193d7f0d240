"""The decay estimate against quadrature and mpmath, its bound, and the sum that it stands for."""

import math

import numpy as np
import pytest

from ropecli.analysis.decay import decay_bound, decay_estimate, sinusoidal_embedding
from ropecli.rope import RopeGeometry

LLAMA_2 = RopeGeometry(128, 128, 10_000.0, 4096).inv_freq()
DISTANCES = np.array([1, 2, 7, 30, 100, 1000, 4096, 32768, 10**6])


def by_quadrature(inv_freq: np.ndarray, distance: float) -> complex:
    """∫_0^1 e^(it·θ(s)) ds, θ exponential between pairs; the last falls as the one before. By Gauss and Legendre."""
    ends = np.append(inv_freq, inv_freq[-1] ** 2 / inv_freq[-2])
    at, weights = np.polynomial.legendre.leggauss(150)
    share = (at + 1) / 2
    turned = inv_freq[:, None] ** (1 - share) * ends[1:, None] ** share
    return complex((np.exp(1j * distance * turned) @ weights).mean() / 2)


@pytest.mark.parametrize(
    "inv_freq",
    [LLAMA_2, np.array([1.0, 0.4, 0.05, 0.02]), np.array([0.5, 0.5 * (1 + 3e-6), 0.5, 0.5])],
    ids=["llama 2", "steps", "level"],
)
@pytest.mark.parametrize("distance", [1, 200])
def test_it_is_the_integral(inv_freq, distance):
    values = decay_estimate(inv_freq, np.array([distance]))
    assert values == pytest.approx(np.array([by_quadrature(inv_freq, distance)]), abs=1e-8)


@pytest.mark.parametrize("rope_theta", [10_000.0, 500_000.0])
def test_of_plain_frequencies_it_is_the_blogs_exponential_integral(rope_theta):
    mpmath = pytest.importorskip("mpmath")
    values = decay_estimate(RopeGeometry(128, 128, rope_theta, 4096).inv_freq(), DISTANCES)
    for distance, value in zip(DISTANCES.tolist(), values, strict=True):
        ends = [mpmath.ei(mpmath.mpc(0, end)) for end in (distance / rope_theta, distance)]
        assert abs(value - complex((ends[1] - ends[0]) / math.log(rope_theta))) < 1e-10


@pytest.mark.parametrize("rope_theta", [100.0, 500_000.0])
def test_the_bound_by_parts(rope_theta):
    distances = np.unique(np.geomspace(1, 1e9, 400).round())
    values = np.abs(decay_estimate(RopeGeometry(64, 64, rope_theta, 4096).inv_freq(), distances))
    bound = decay_bound(rope_theta, distances)
    assert (values <= bound).all()
    assert bound.max() == 1
    # not loose by more than a factor of about two, where it is of use
    assert (values[distances > 10 * rope_theta] > bound[distances > 10 * rope_theta] / 3).all()


def test_the_sinusoidal_embedding_as_it_is_written():
    values = sinusoidal_embedding(np.array([0, 3, 17]), 8)
    assert values.shape == (3, 8)
    for row, position in zip(values, (0, 3, 17), strict=True):
        for pair in range(4):
            angle = position / 10_000 ** (2 * pair / 8)
            assert row[2 * pair] == pytest.approx(math.sin(angle))
            assert row[2 * pair + 1] == pytest.approx(math.cos(angle))
