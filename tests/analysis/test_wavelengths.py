"""The critical dimension, by pairs counted one by one."""

import math

import pytest

from ropecli.analysis.wavelengths import critical_dimension
from ropecli.rope import RopeGeometry

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
