"""Wavelengths and turns: the figures of the sources, and pairs counted one by one."""

import math

import numpy as np
import pytest

from ropecli.analysis.wavelengths import (
    critical_dimension,
    effective_range,
    half_wavelength,
    longest_wavelength,
    rotations,
    share_rotated,
)
from ropecli.rope import RopeGeometry

LLAMA_2 = RopeGeometry(128, 128, 10_000.0, 4096)
BLOG = RopeGeometry(256, 256, 10_000.0, 4096).inv_freq()
"""Its d = 256 has 128 pairs, 0 to 127."""
STILL = np.zeros(4)


def test_the_blogs_wavelengths():
    assert longest_wavelength(BLOG) == pytest.approx(58_470, abs=5)
    assert longest_wavelength(BLOG) == pytest.approx(2 * math.pi * 10_000 ** (127 / 128))
    assert half_wavelength(BLOG) == pytest.approx(29_235, abs=5)  # 29.24k
    assert effective_range(BLOG) == pytest.approx(5_847, abs=5)
    # the blog's 5.84k is cut off, not rounded
    assert 2 * math.pi / BLOG[95] == pytest.approx(effective_range(BLOG), rel=1e-9)


def test_three_quarters_of_the_blogs_pairs_turn_within_the_effective_range():
    turned = [2 * math.pi / one <= effective_range(BLOG) * (1 + 1e-9) for one in BLOG]
    assert turned == [True] * 96 + [False] * 32
    assert share_rotated(BLOG, effective_range(BLOG)) == 0.75


def test_turns_are_the_length_over_the_wavelength():
    """YaRN, eq. 13: λ_d = 2π·b^(2d/|D|)."""
    by_hand = [4096 / (2 * math.pi * 10_000 ** (2 * pair / 128)) for pair in range(64)]
    np.testing.assert_allclose(rotations(LLAMA_2.inv_freq(), 4096), by_hand, rtol=1e-12)
    assert share_rotated(LLAMA_2.inv_freq(), 4096) == sum(one >= 1 for one in by_hand) / 64 == 46 / 64


def test_pairs_that_stand_still_have_no_wavelength():
    with_still = np.array([1.0, 0.1, 0.0, 0.0])
    assert longest_wavelength(with_still) == pytest.approx(20 * math.pi)
    assert share_rotated(with_still, 1e12) == 0.5
    for quantity in (longest_wavelength, half_wavelength, effective_range):
        assert math.isnan(quantity(STILL))
    assert math.isnan(share_rotated(STILL, effective_range(STILL)))


def test_llama_2s_critical_dimension():
    assert critical_dimension(LLAMA_2) == 92


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
def test_the_critical_dimension_counts_the_pairs_that_complete_a_turn(geometry):
    counted = 2 * int((geometry.inv_freq() * geometry.original_max_position_embeddings >= 2 * math.pi).sum())
    assert critical_dimension(geometry) == counted
