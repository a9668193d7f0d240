"""How far apart two neighbouring positions are, by the sine of the angle between their images.

Source: Xiong et al. 2023 (arXiv:2309.16039), appendix B, Theorem 1. Its ABF is `abf` with beta, its PI `linear` with
alpha = 1/factor; here it goes by inv_freq, whatever the method. Logarithms are natural.
"""

import math

import numpy as np

from ropecli.analysis.special import exponential_integral


def sine_similarity(inv_freq: np.ndarray, x: np.ndarray, gap: int = 1) -> float:
    """sin∠(f(x, n + gap), f(x, n)) = Im⟨·,·⟩/‖x‖²: Σ_j (x_2j² + x_2j+1²)·sin(gap·θ_j) / Σ_k x_k², for any n.

    x: shape (rotary_dim,), neighbours paired.
    """
    squares = x**2
    return float(squares.reshape(-1, 2).sum(axis=1) @ np.sin(gap * inv_freq) / squares.sum())


def granularity(inv_freq: np.ndarray) -> float:
    """C_d/(d/2), the mean of sin θ_j: the sine similarity of consecutive images of a vector of ones.

    The paper's C_d is the sum, for which it gives the limits 1/(ln b + ln β) and α/ln b. A sum of d/2 terms grows
    with d; the limits are those of the mean (the closed forms are right, their limits leave out the factor 2/d).
    Theorem 1 bounds the sine by min x_k²/‖x‖²·C_d and max x_k²/‖x‖²·C_d. Each sine is weighed by two squares, so that
    both lack a factor 2: the lower bound is right but loose, the upper one wrong.
    """
    return float(np.sin(inv_freq).mean())


def granularity_limit(rope_theta: float, alpha: float = 1.0) -> float:
    """α/ln b, what the paper takes for the limit of C_d/(d/2) as d grows: 0.027 at α = 1/4, b = 10,000, and 0.076 at
    b = 500,000. Good for small α: `exact_limit` is 5% less at α = 1.
    """
    return alpha / math.log(rope_theta)


def exact_limit(rope_theta: float, alpha: float = 1.0) -> float:
    """lim C_d/(d/2) = (Si(α) - Si(α/b)) / ln b.

    The paper's bounds on it, (α/ln b)·((b - 1)/b - (α/π)(b² - 1)/b²) and (α/ln b)·(b - 1)/b, hold; the square's sum
    has the limit (b² - 1)/(2b²·ln b), so that the lower one may have 2π for π.
    """
    near, far = exponential_integral(np.array([alpha / rope_theta, alpha]))
    return float((near - far).imag / math.log(rope_theta))
