"""Wavelengths of the rotary pairs, numbers of rotations, and float32 errors of their angles.

Sources: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 2.3; Liu et al. 2023 (arXiv:2310.05209) for the critical
dimension.
"""

import math

import numpy as np

from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScaledRope

_LARGEST = 300.0
"""The logarithm of the largest base that power_law accepts."""


def rotations(inv_freq: np.ndarray, length: float) -> np.ndarray:
    """r = L/λ_d: rotations of each pair within `length` tokens, shape (rotary_dim/2,)."""
    return inv_freq * length / (2 * math.pi)


def longest_wavelength(inv_freq: np.ndarray) -> float:
    """2π/θ of the slowest rotating pair, tokens; NaN if no pair rotates."""
    rotating = inv_freq[inv_freq > 0]
    return 2 * math.pi / float(rotating.min()) if rotating.size else math.nan


def critical_dimension(geometry: RopeGeometry) -> int:
    """2⌈(d/2)·log_b(L/2π)⌉: the number of dimensions whose pairs complete a rotation in pretraining, 0 to d.

    The model has not seen all angles of the other dimensions, which fail beyond the pretraining length (Liu et al.
    2023, section 4.1).
    """
    limit = geometry.original_max_position_embeddings / (2 * math.pi)
    if geometry.rope_theta <= 1:
        complete = geometry.pairs if limit >= 1 else 0
    else:
        complete = math.ceil(geometry.pairs * math.log(limit) / math.log(geometry.rope_theta))
    return 2 * min(max(complete, 0), geometry.pairs - geometry.still_pairs)


def power_law(rope: ScaledRope) -> tuple[float, float] | None:
    """(b, α) if the frequencies are α·b^(-2i/d), as in PI, ABF and NTK; otherwise None."""
    inv_freq, pairs = rope.inv_freq, rope.geometry.pairs
    if not (inv_freq > 0).all():
        return None
    logarithm = pairs * math.log(inv_freq[0] / inv_freq[1]) if pairs > 1 else math.log(rope.rope_theta)
    powers = inv_freq[0] * np.exp(-logarithm / pairs * np.arange(pairs))
    if 0 < logarithm < _LARGEST and np.allclose(inv_freq, powers, rtol=1e-9, atol=0):
        return math.exp(logarithm), float(inv_freq[0])
    return None


def float32_angle_error(rope: ScaledRope, position: int) -> np.ndarray:
    """Error of each pair's angle at `position` (tokens) in float32, radians, shape (rotary_dim/2,).

    transformers computes the powers of the base, the scaling and the product with the position in float32, and so does
    this. For methods that take more steps in transformers (yarn), its error may be a few times larger or smaller.
    """
    law = power_law(rope)
    base = law[0] if law else rope.rope_theta  # for dynamic, the base at this length is not rope_theta
    width = np.float32(rope.geometry.rotary_dim)
    with np.errstate(over="ignore"):  # very slow pairs: 1 / inf
        powers = np.float32(base) ** (np.arange(0, width, 2, dtype=np.float32) / width)
    scaling = (rope.inv_freq / rope.geometry.powers(base)).astype(np.float32)
    angles = np.float32(1) / powers * scaling * np.float32(position)
    return np.abs(angles.astype(np.float64) - rope.inv_freq * position)
