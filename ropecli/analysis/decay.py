"""Decay of the inner product of a query and a key with distance: the exact sum, and an integral estimate.

Source: "Position Embeddings: Sinusoidal, RoPE" (blog), section "Decay estimates", after Su et al. 2021
(arXiv:2104.09864), section 3.4.3; Vaswani et al. 2017 (arXiv:1706.03762), section 3.5, for the sinusoidal embedding;
Abramowitz and Stegun 1964, 5.1.11 (series) and 5.1.4 with t = 1 + v/z, for the exponential integral.
"""

from functools import cache

import numpy as np

_LEVEL = 1e-6
"""Frequencies whose log ratio is below this are treated as equal."""
_NEAR = 4.0
"""Use the series up to here, and Gauss-Laguerre quadrature beyond."""
_TERMS = 40
_NODES = 60


def mean_rotation(inv_freq: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """⟨φ_t(q), φ_0(k)⟩ for unit vectors with equal weight in every pair: the mean of e^(itθ_j), complex.

    The real part is `score` / rotary_dim.
    """
    return np.exp(1j * np.multiply.outer(distances, inv_freq)).mean(axis=-1)


def decay_estimate(inv_freq: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Integral estimate of mean_rotation: ∫_0^1 e^(it·θ(s)) ds, complex, for distances t above 0.

    θ(s) interpolates exponentially between the pairs. For θ(s) = b^(-s) the integral is (1/ln b) ∫_(1/b)^1
    e^(itu)/u du = (E1(-it/b) - E1(-it)) / ln b, as in the blog; for other frequencies it is a sum of such pieces.

    The blog concludes O(1/t). This holds for the integral at t > b, not for the sum, which is almost periodic: the mean
    of its squared magnitude over all distances is 2/d.
    """
    rotating = inv_freq[inv_freq > 0]
    distances = np.asarray(distances, dtype=np.float64)
    if not rotating.size:
        return np.ones(distances.shape, dtype=complex)
    # extrapolate one more frequency, at the ratio of the last two, for the end of the last piece
    following = np.append(rotating[1:], rotating[-1] * (rotating[-1] / rotating[-2] if rotating.size > 1 else 1.0))
    pieces = _pieces(np.expand_dims(distances, -1), rotating, following)
    return (pieces.sum(axis=-1) + len(inv_freq) - rotating.size) / len(inv_freq)


def decay_bound(rope_theta: float, distances: np.ndarray) -> np.ndarray:
    """The O(1/t) bound with its constant: for b^(-2i/d) the integral is at most 2b / (t·ln b), by parts, and at most 1.

    It is below 1 only for t > 2b / ln b: 2,171 tokens for b = 10,000, and 76,205 for b = 500,000.
    """
    return np.minimum(1.0, 2 * rope_theta / (np.asarray(distances) * np.log(rope_theta)))


def sinusoidal_embedding(positions: np.ndarray, dim: int, base: float = 10000.0) -> np.ndarray:
    """PE(t)_2j = sin(t·b^(-2j/dim)), PE(t)_2j+1 = cos(t·b^(-2j/dim)), shape (*positions.shape, dim); dim is even.

    Inner products are half the scores of rotary embeddings: PE(t)·PE(s) = Σ_j cos((t - s)θ_j).
    """
    angles = np.multiply.outer(positions, base ** (-np.arange(0, dim, 2) / dim))
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(*np.shape(positions), dim)


def _pieces(distances: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """∫_0^1 e^(itθ(s)) ds with ln θ linear from `first` to `last`."""
    logarithms = np.log(first / last)
    with np.errstate(divide="ignore", invalid="ignore"):
        falling = (exponential_integral(distances * last) - exponential_integral(distances * first)) / logarithms
    # nearly equal frequencies: the difference above cancels, so interpolate θ linearly
    middle = distances * np.sqrt(first * last)
    level = np.exp(1j * middle) * np.sinc(middle * logarithms / (2 * np.pi))
    return np.where(np.abs(logarithms) < _LEVEL, level, falling)


def exponential_integral(x: np.ndarray) -> np.ndarray:
    """E1(-ix) = -Ei(ix) + iπ = ∫_x^∞ e^(iu)/u du for x > 0, complex, same shape as x, accurate to 1e-12.

    The real part is -Ci(x), the imaginary part π/2 - Si(x).
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
    """E1(z) = e^(-z) ∫_0^∞ e^(-v) / (z + v) dv, by Gauss-Laguerre quadrature."""
    nodes, weights = _rule()
    return np.exp(1j * x) * (weights / (np.expand_dims(x, -1) * -1j + nodes)).sum(axis=-1)


@cache
def _rule() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.laguerre.laggauss(_NODES)
