"""Wavelengths and rotations: the figures of the sources, and pairs counted one by one; float32 errors of angles."""

import math

import numpy as np
import pytest

from ropecli.analysis.wavelengths import (
    critical_dimension,
    effective_range,
    float32_angle_error,
    half_wavelength,
    longest_wavelength,
    share_rotated,
)
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

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


def test_the_float32_error_is_that_of_a_rounded_table_and_product():
    rope, position = scale(LLAMA_2, make_spec("none")), 2**20 - 1
    rounded = (rope.inv_freq.astype(np.float32) * np.float32(position)).astype(np.float64)
    error = np.abs(rounded - rope.inv_freq * position).max()
    assert error / 4 <= float32_angle_error(rope, position).max() <= 4 * error
