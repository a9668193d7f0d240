"""The wavelengths of the rotary pairs, how often each rotates, and what float32 loses of its angle.

Sources: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 2.3; "embedding and rope" (blog, 5 February 2025) for the
half wavelength and the effective range; Liu et al. 2023 (arXiv:2310.05209) for the critical dimension.
"""

import math

import numpy as np

from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScaledRope

_LARGEST = 300.0
"""The logarithm of the largest base that is taken for one."""
_SAME = 1e-9
"""Relative: wavelengths that are equal on paper differ by a rounding."""


def rotations(inv_freq: np.ndarray, length: float) -> np.ndarray:
    """r = L/λ_d: how often each pair rotates in so many tokens, shape (rotary_dim/2,)."""
    return inv_freq * length / (2 * math.pi)


def share_rotated(inv_freq: np.ndarray, length: float) -> float:
    """The share of the pairs, 0..1, that complete a rotation in so many tokens; NaN where those are NaN."""
    return math.nan if math.isnan(length) else float((rotations(inv_freq, length) >= 1 - _SAME).mean())


def longest_wavelength(inv_freq: np.ndarray) -> float:
    """2π/θ of the slowest pair that turns at all, tokens; NaN where none does.

    The blog takes it for the length up to which a rotation is unique. That holds of the slowest pair alone. No two
    positions at all have the same rotation of every pair, since a pair of θ_0 = 1 radian per token never comes back
    to where it was: π is irrational. What there is to lose is the distance between images (see `granularity`).
    """
    turning = inv_freq[inv_freq > 0]
    return 2 * math.pi / float(turning.min()) if turning.size else math.nan


def half_wavelength(inv_freq: np.ndarray) -> float:
    """Tokens after which the slowest pair's cosine rises again."""
    return longest_wavelength(inv_freq) / 2


def effective_range(inv_freq: np.ndarray) -> float:
    """A tenth of the longest wavelength, tokens: the blog's rule of thumb for how far a score tells distances apart.

    At b = 10,000 three quarters of the pairs, rounded down, have turned by then, whatever the width: 10,000^(1/4) is
    10. (The blog speaks of 128 dimensions where it has 128 pairs.)
    """
    return longest_wavelength(inv_freq) / 10


def critical_dimension(geometry: RopeGeometry) -> int:
    """2⌈(d/2)·log_b(L/2π)⌉: how many dimensions belong to pairs that complete a turn in pretraining; from 0 to d.

    Those above have never been seen at all their angles, and are what fails beyond the pretraining length (Liu et
    al. 2023, section 4.1).
    """
    limit = geometry.original_max_position_embeddings / (2 * math.pi)
    if geometry.rope_theta <= 1:
        turning = geometry.pairs if limit >= 1 else 0
    else:
        turning = math.ceil(geometry.pairs * math.log(limit) / math.log(geometry.rope_theta))
    return 2 * min(max(turning, 0), geometry.pairs - geometry.still_pairs)


def power_law(rope: ScaledRope) -> tuple[float, float] | None:
    """(b, α) where the frequencies are α·b^(-2i/d), as in PI, ABF and NTK; None where they are no such thing."""
    inv_freq, pairs = rope.inv_freq, rope.geometry.pairs
    if not (inv_freq > 0).all():
        return None
    logarithm = pairs * math.log(inv_freq[0] / inv_freq[1]) if pairs > 1 else math.log(rope.rope_theta)
    powers = inv_freq[0] * np.exp(-logarithm / pairs * np.arange(pairs))
    if 0 < logarithm < _LARGEST and np.allclose(inv_freq, powers, rtol=1e-9, atol=0):
        return math.exp(logarithm), float(inv_freq[0])
    return None


def float32_angle_error(rope: ScaledRope, position: int) -> np.ndarray:
    """How far each pair's angle at `position` (tokens) is from the exact one, radians, shape (rotary_dim/2,).

    transformers keeps inv_freq in float32 and multiplies it by the position there. So in float32: the powers of the
    base, what the method makes of them, and the product with the position. Where transformers takes more steps (yarn),
    its error may be a few times as large or as small.
    """
    law = power_law(rope)
    base = law[0] if law else rope.rope_theta  # dynamic has another base than rope_theta at this length
    width, one = np.float32(rope.geometry.rotary_dim), np.float32(1)
    with np.errstate(over="ignore"):  # a pair that hardly rotates: 1 / inf
        powers = np.float32(base) ** (np.arange(0, width, 2, dtype=np.float32) / width)
    scaling = (rope.inv_freq / rope.geometry.powers(base)).astype(np.float32)
    angles = one / powers * scaling * np.float32(position)
    return np.abs(angles.astype(np.float64) - rope.inv_freq * position)
