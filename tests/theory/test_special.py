"""The exponential integral, held against mpmath's."""

import numpy as np
import pytest

from ropecli.theory.special import exponential_integral

ARGUMENTS = np.concatenate([np.geomspace(1e-12, 1e9, 60), np.linspace(3.9, 4.1, 21), np.linspace(0.5, 30, 40)])


def reference(function) -> np.ndarray:
    return np.array([complex(function(float(x))) for x in ARGUMENTS])


def test_it_is_e1_on_the_imaginary_axis():
    mpmath = pytest.importorskip("mpmath")
    expected = reference(lambda x: mpmath.e1(mpmath.mpc(0, -x)))
    np.testing.assert_allclose(exponential_integral(ARGUMENTS), expected, rtol=1e-13, atol=1e-14)


def test_it_is_the_blogs_ei_but_for_the_sign_and_a_half_turn():
    mpmath = pytest.importorskip("mpmath")
    expected = reference(lambda x: -mpmath.ei(mpmath.mpc(0, x)) + mpmath.mpc(0, mpmath.pi))
    np.testing.assert_allclose(exponential_integral(ARGUMENTS), expected, rtol=1e-12, atol=1e-13)


def test_its_parts_are_the_cosine_and_sine_integrals():
    mpmath = pytest.importorskip("mpmath")
    found = exponential_integral(ARGUMENTS)
    np.testing.assert_allclose(found.real, [-float(mpmath.ci(float(x))) for x in ARGUMENTS], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(found.imag, [float(mpmath.pi / 2 - mpmath.si(float(x))) for x in ARGUMENTS], atol=1e-12)


def test_it_keeps_the_shape():
    values = np.array([[0.5, 2.0, 7.0], [1.0, 4.0, 400.0]])
    found = exponential_integral(values)
    assert found.shape == (2, 3)
    np.testing.assert_array_equal(found[1], exponential_integral(values[1]))
