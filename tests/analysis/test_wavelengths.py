"""Wavelengths and rotations: the figures of the sources, and pairs counted one by one.

The float32 error of angles, against the tables and the product of stock transformers.
"""

import math

import numpy as np
import pytest

from ropecli.analysis.wavelengths import (
    critical_dimension,
    effective_range,
    half_wavelength,
    longest_wavelength,
    share_rotated,
)
from ropecli.rope import RopeGeometry

LLAMA_2 = RopeGeometry(128, 128, 10_000.0, 4096)
STILL = np.zeros(4)


def test_pairs_that_do_not_rotate_have_no_wavelength():
    with_still = np.array([1.0, 0.1, 0.0, 0.0])
    assert longest_wavelength(with_still) == pytest.approx(20 * math.pi)
    assert share_rotated(with_still, 1e12) == 0.5
    for quantity in (longest_wavelength, half_wavelength, effective_range):
        assert math.isnan(quantity(STILL))
    assert math.isnan(share_rotated(STILL, effective_range(STILL)))


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
