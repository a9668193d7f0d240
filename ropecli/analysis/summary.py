"""All quantities of analysis/ for one rope, as JSON values."""

import math
from typing import Any

import numpy as np

from ropecli.analysis import wavelengths
from ropecli.analysis.decay import decay_bound, decay_estimate, mean_rotation, sinusoidal_embedding
from ropecli.analysis.granularity import (
    closest_images,
    distance_to_old_images,
    exact_limit,
    granularity,
    granularity_limit,
)
from ropecli.analysis.score import first_negative, first_rise, largest_distance
from ropecli.analysis.wavelengths import float32_angle_error
from ropecli.scaling.spec import ScaledRope


def summarize(rope: ScaledRope, target: int) -> dict[str, Any]:
    """The quantities of `ropecli theory` for one rope that reads `target` tokens; null where undefined.

    Lengths, distances and wavelengths in tokens, angles in radians. Lists have one entry per pair, fastest first.
    """
    geometry, farthest = rope.geometry, largest_distance(rope, target)
    return {
        "method": rope.spec.method.name,
        "factor": rope.spec.factor,
        "layer_type": geometry.layer_type,
        "rotary_dim": geometry.rotary_dim,
        "rope_theta": rope.rope_theta,
        "original_max_position_embeddings": geometry.original_max_position_embeddings,
        "target_length": target,
        "attention_factor": rope.attention_factor,
        **_rotations(rope, farthest + 1),
        "largest_distance": farthest,
        "first_rise": first_rise(rope.inv_freq),
        "first_negative_score": first_negative(rope.inv_freq),
        **_granular(rope, target),
        "decay": _decay(rope, farthest),
        "float32_angle_error": float(float32_angle_error(rope, farthest).max()),
    }


def _rotations(rope: ScaledRope, length: int) -> dict[str, Any]:
    inv_freq, geometry = rope.inv_freq, rope.geometry
    longest = wavelengths.longest_wavelength(inv_freq)
    effective = wavelengths.effective_range(inv_freq)
    original_length = geometry.original_max_position_embeddings
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = inv_freq / geometry.inv_freq()
    rotations, rotations_in_target = (wavelengths.rotations(inv_freq, of).tolist() for of in (original_length, length))
    share = wavelengths.share_rotated(inv_freq, effective)
    return {
        "wavelength": rope.wavelength.tolist(),
        "rotations_in_pretraining_length": rotations,
        "rotations_in_target_length": rotations_in_target,
        "frequency_over_pretrained": kept.tolist(),
        "critical_dimension": wavelengths.critical_dimension(geometry),
        "longest_wavelength": longest,
        "half_wavelength": wavelengths.half_wavelength(inv_freq),
        "effective_range": effective,
        "share_rotated_in_effective_range": share,
        "unique_by_slowest_pair": None if math.isnan(longest) else length <= longest,
    }


def _granular(rope: ScaledRope, target: int) -> dict[str, Any]:
    """Granularity and images. Images are of positions, so distance methods have none of their own."""
    inv_freq, original_length = rope.inv_freq, rope.geometry.original_max_position_embeddings
    law, of_images = wavelengths.power_law(rope), rope.remapping is None and target > 1
    closest = closest_images(inv_freq, target) if of_images else (None, None)
    old = rope.geometry.inv_freq()
    return {
        "granularity": granularity(inv_freq),
        "granularity_limit": granularity_limit(*law) if law else None,
        "granularity_exact_limit": exact_limit(*law) if law else None,
        "closest_images": closest[0],
        "closest_images_gap": closest[1],
        "distance_to_old_images": distance_to_old_images(old, inv_freq, original_length, target) if of_images else None,
    }


def _decay(rope: ScaledRope, farthest: int) -> list[dict[str, Any]]:
    """Decay of the score at powers of four up to the largest distance, and at that distance; 1 at distance 0."""
    if farthest == 0:
        return []
    distances = np.array([*(4**power for power in range(32) if 4**power < farthest), farthest])
    exact, estimate = mean_rotation(rope.inv_freq, distances), decay_estimate(rope.inv_freq, distances)
    law = wavelengths.power_law(rope)
    bound = decay_bound(law[0], distances * law[1]).tolist() if law else [None] * len(distances)
    # the normalized inner product of two sinusoidal embeddings with the pretrained base
    embedded = sinusoidal_embedding(np.append(distances, 0), rope.geometry.rotary_dim, rope.geometry.rope_theta)
    sinusoidal = (embedded[:-1] @ embedded[-1] / (rope.geometry.rotary_dim / 2)).tolist()
    return [
        {
            "distance": int(distance),
            "score": float(mean.real),
            "magnitude": float(abs(mean)),
            "estimate": float(abs(integral)),
            "bound": limit,
            "sinusoidal": added,
        }
        for distance, mean, integral, limit, added in zip(distances, exact, estimate, bound, sinusoidal, strict=True)
    ]
