"""Wavelengths of the rotary pairs, and numbers of rotations.

Sources: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 2.3; Liu et al. 2023 (arXiv:2310.05209) for the critical
dimension.
"""

import math

import numpy as np

from ropecli.rope import RopeGeometry


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
