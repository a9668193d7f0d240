"""The exponential integral, held against mpmath's."""

import numpy as np
import pytest

from ropecli.theory.special import exponential_integral

ARGUMENTS = np.concatenate([np.geomspace(1e-12, 1e9, 60), np.linspace(3.9, 4.1, 21), np.linspace(0.5, 30, 40)])


def test_it_is_e1_on_the_imaginary_axis():
    mpmath = pytest.importorskip("mpmath")
    expected = [complex(mpmath.e1(mpmath.mpc(0, -float(x)))) for x in ARGUMENTS]
    np.testing.assert_allclose(exponential_integral(ARGUMENTS), expected, rtol=1e-13, atol=1e-14)
