"""Wavelengths and rotations: the figures of the sources, and pairs counted one by one.

The float32 error of angles, against the tables and the product of stock transformers.
"""

import math

import numpy as np
import pytest

from ropecli.analysis.wavelengths import critical_dimension, float32_angle_error
from ropecli.config.encoding import native_parameters
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import ScaledRope, make_spec

LLAMA_2 = RopeGeometry(128, 128, 10_000.0, 4096)


@pytest.mark.parametrize(
    "geometry",
    [
        LLAMA_2,
        RopeGeometry(256, 80, 5e5, 8192),
        RopeGeometry(128, 128, 1.0, 4096),
        RopeGeometry(128, 128, 10.0, 10**6, still_pairs=1),
    ],
    ids=["llama 2", "partial", "base 1", "all but a still one"],
)
def test_the_critical_dimension_counts_the_pairs_that_complete_a_rotation(geometry):
    counted = 2 * int((geometry.inv_freq() * geometry.original_max_position_embeddings >= 2 * math.pi).sum())
    assert critical_dimension(geometry) == counted


LAST = 2**20 - 1


def live_error(rope: ScaledRope, position: int) -> np.ndarray:
    """The error of the angles of transformers' module, radians."""
    import torch
    from transformers import PhiConfig
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    geometry = rope.geometry
    config = PhiConfig(
        hidden_size=geometry.head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=geometry.original_max_position_embeddings,
        rope_parameters={**native_parameters(rope), "partial_rotary_factor": geometry.rotary_dim / geometry.head_dim},
    )
    angles = PhiRotaryEmbedding(config).inv_freq[:, None].float() @ torch.tensor([[position]]).float()
    return np.abs(angles[:, 0].double().numpy() - rope.inv_freq * position)


@pytest.mark.transformers("5.20", "yarn ignores the partial_rotary_factor of Phi")
@pytest.mark.parametrize("method", ["none", "yarn"])
@pytest.mark.parametrize("geometry", [LLAMA_2, RopeGeometry(80, 32, 10000.0, 2048)], ids=["llama 2", "partial"])
def test_the_float32_error_is_that_of_the_live_module(geometry, method):
    rope = scale(geometry, make_spec(method, 4.0))
    ours, theirs = float32_angle_error(rope, LAST).max(), live_error(rope, LAST).max()
    assert theirs / 4 <= ours <= theirs * 4
    assert (float32_angle_error(rope, LAST) <= 1e-6 * rope.inv_freq * LAST + 1e-20).all()
