"""The exponential integral on the imaginary axis, which the decay of a score and the limit of its granularity need.

Source: Abramowitz and Stegun 1964, 5.1.11 (series), 5.1.4 with t = 1 + v/z (the integral that falls off).
"""

from functools import cache

import numpy as np

_NEAR = 4.0
"""Up to here the series, whose terms do not grow large yet."""
_TERMS = 40
_NODES = 60


def exponential_integral(x: np.ndarray) -> np.ndarray:
    """E1(-ix) = -Ei(ix) + iπ = ∫_x^∞ e^(iu)/u du for x > 0, complex, of x's shape; to 1e-12.

    Its real part is -Ci(x), its imaginary part π/2 - Si(x).
    """
    x = np.asarray(x, dtype=np.float64)
    near, far = _series(np.minimum(x, _NEAR)), _laguerre(np.maximum(x, _NEAR))
    return np.where(x <= _NEAR, near, far)


def _series(x: np.ndarray) -> np.ndarray:
    """E1(z) = -γ - ln z - Σ (-z)^k / (k·k!)."""
    z = -1j * x
    total, term = np.zeros(x.shape, dtype=complex), np.ones(x.shape, dtype=complex)
    for k in range(1, _TERMS + 1):
        term = term * -z / k
        total += term / k
    return -np.euler_gamma - np.log(z) - total


def _laguerre(x: np.ndarray) -> np.ndarray:
    """E1(z) = e^(-z) ∫_0^∞ e^(-v) / (z + v) dv, by Gauss and Laguerre."""
    nodes, weights = _rule()
    return np.exp(1j * x) * (weights / (np.expand_dims(x, -1) * -1j + nodes)).sum(axis=-1)


@cache
def _rule() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.laguerre.laggauss(_NODES)
