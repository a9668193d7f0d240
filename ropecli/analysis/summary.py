"""All quantities of analysis/ for one rope, as JSON values."""

import math
from typing import Any

import numpy as np

from ropecli.analysis.granularity import closest_images, distance_to_old_images, granularity
from ropecli.analysis.score import first_negative, largest_distance, mean_rotation
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScaledRope


def critical_dimension(geometry: RopeGeometry) -> int:
    """The number of dimensions whose pairs complete a rotation in pretraining: 2⌈(d/2)·log_b(L/2π)⌉, 0 to d.

    The model has not seen all angles of the other dimensions, which fail beyond the pretraining length. Source: Liu et
    al. 2023 (arXiv:2310.05209), section 4.1.
    """
    return 2 * int((geometry.inv_freq() * geometry.original_max_position_embeddings >= 2 * math.pi).sum())


def summarize(rope: ScaledRope, target: int) -> dict[str, Any]:
    """The quantities of `ropecli theory` for one rope that reads `target` tokens; null where undefined.

    Lengths, distances and wavelengths in tokens, angles in radians. Lists have one entry per pair, fastest first.
    """
    geometry, inv_freq, farthest = rope.geometry, rope.inv_freq, largest_distance(rope, target)
    pretrained, original_length = geometry.inv_freq(), geometry.original_max_position_embeddings
    rotations, finite = inv_freq / (2 * math.pi), rope.wavelength[inv_freq > 0]
    # of positions, so distance methods have none of their own
    has_images = rope.remapping is None and target > 1
    closest, gap = closest_images(inv_freq, target) if has_images else (None, None)
    to_old = distance_to_old_images(pretrained, inv_freq, original_length, target) if has_images else None
    distances = np.array([*(4**power for power in range(32) if 4**power < farthest), *[farthest] * (farthest > 0)])
    means = mean_rotation(inv_freq, distances)
    decay = [
        {"distance": int(distance), "score": float(mean.real), "magnitude": float(abs(mean))}
        for distance, mean in zip(distances, means, strict=True)
    ]
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = inv_freq / pretrained
    return {
        "method": rope.spec.method.name,
        "factor": rope.spec.factor,
        "layer_type": geometry.layer_type,
        "rotary_dim": geometry.rotary_dim,
        "rope_theta": rope.rope_theta,
        "original_max_position_embeddings": original_length,
        "target_length": target,
        "attention_factor": rope.attention_factor,
        "wavelength": rope.wavelength.tolist(),
        "rotations_in_pretraining_length": (rotations * original_length).tolist(),
        "rotations_in_target_length": (rotations * (farthest + 1)).tolist(),
        "frequency_over_pretrained": kept.tolist(),
        "critical_dimension": critical_dimension(geometry),
        "longest_wavelength": float(finite.max()) if finite.size else math.nan,
        "largest_distance": farthest,
        "first_negative_score": first_negative(inv_freq),
        "decay": decay,
        "granularity": granularity(inv_freq),
        "closest_images": closest,
        "closest_images_gap": gap,
        "distance_to_old_images": to_old,
    }
