"""The decay estimate against quadrature, and its bound."""

import numpy as np
import pytest

from ropecli.analysis.decay import decay_bound, decay_estimate
from ropecli.rope import RopeGeometry

LLAMA_2 = RopeGeometry(128, 128, 10_000.0, 4096).inv_freq()


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
def test_the_estimate_is_the_integral(inv_freq, distance):
    values = decay_estimate(inv_freq, np.array([distance]))
    assert values == pytest.approx(np.array([by_quadrature(inv_freq, distance)]), abs=1e-8)


@pytest.mark.parametrize("rope_theta", [100.0, 500_000.0])
def test_the_bound_by_parts(rope_theta):
    distances = np.unique(np.geomspace(1, 1e9, 400).round())
    values = np.abs(decay_estimate(RopeGeometry(64, 64, rope_theta, 4096).inv_freq(), distances))
    bound = decay_bound(rope_theta, distances)
    assert (values <= bound).all()
    assert bound.max() == 1
    # not loose by more than a factor of about two, where it is of use
    assert (values[distances > 10 * rope_theta] > bound[distances > 10 * rope_theta] / 3).all()
