"""What holds of the methods for every geometry and factor."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import scale

IDENTITIES = ["none", "linear", "ntk", "dynamic", "ntk-by-parts", "yarn", "llama3"]
MONOTONE = [(method, {}) for method in IDENTITIES] + [("abf", {"beta": 50.0})]

few = settings(max_examples=40, deadline=None)
factors = st.floats(1.0, 1000.0)


@st.composite
def geometries(draw) -> RopeGeometry:
    width = 2 * draw(st.integers(2, 128))
    theta = 10 ** draw(st.floats(3, 7))
    return RopeGeometry(width, width, theta, draw(st.integers(16, 1_000_000)))


def turns(geometry: RopeGeometry) -> np.ndarray:
    """How often each pair turns in the pretraining window."""
    return geometry.inv_freq() * geometry.original_max_position_embeddings / (2 * math.pi)


@pytest.mark.parametrize("method", IDENTITIES)
@few
@given(geometry=geometries())
def test_a_factor_of_one_changes_nothing(method, geometry):
    scaled = scale(geometry, ScalingSpec(method, 1.0))
    np.testing.assert_allclose(scaled.inv_freq, geometry.inv_freq(), rtol=1e-12)
    assert scaled.attention_factor == 1.0


@pytest.mark.parametrize(("method", "params"), MONOTONE, ids=[method for method, _ in MONOTONE])
@few
@given(geometry=geometries(), factor=factors)
def test_frequencies_are_positive_and_do_not_increase(method, params, geometry, factor):
    inv_freq = scale(geometry, ScalingSpec(method, factor, params)).inv_freq
    assert inv_freq.shape == (geometry.rotary_dim // 2,)
    assert np.isfinite(inv_freq).all()
    assert (inv_freq > 0).all()
    assert (np.diff(inv_freq) <= 0).all()


@pytest.mark.parametrize("method", [method for method in IDENTITIES if method != "dynamic"])
@few
@given(geometry=geometries(), factor=factors)
def test_no_pair_is_sped_up_or_slowed_by_more_than_the_factor(method, geometry, factor):
    change = geometry.inv_freq() / scale(geometry, ScalingSpec(method, factor)).inv_freq
    assert (change >= 1 - 1e-9).all()
    assert (change <= factor * (1 + 1e-9)).all()


@pytest.mark.parametrize("method", ["yarn", "ntk-by-parts"])
@few
@given(
    geometry=geometries(),
    factor=factors,
    slow=st.floats(0.3, 2.0),
    spread=st.floats(1.5, 64.0),
)
def test_yarn_leaves_fast_pairs_and_interpolates_slow_ones(method, geometry, factor, slow, spread):
    """The rounding of the ramp's ends goes outwards from the ramp, so it never moves a pair beyond either β."""
    fast = slow * spread
    inv_freq = scale(geometry, ScalingSpec(method, factor, {"beta_fast": fast, "beta_slow": slow})).inv_freq
    base, count = geometry.inv_freq(), turns(geometry)
    left, divided = count > fast * (1 + 1e-9), count < slow * (1 - 1e-9)
    np.testing.assert_allclose(inv_freq[left], base[left], rtol=1e-12)
    np.testing.assert_allclose(inv_freq[divided], base[divided] / factor, rtol=1e-12)


@few
@given(geometry=geometries(), factor=factors)
def test_llama3_leaves_fast_pairs_and_interpolates_slow_ones(geometry, factor):
    inv_freq = scale(geometry, ScalingSpec("llama3", factor)).inv_freq
    base, count = geometry.inv_freq(), turns(geometry)
    left, divided = count > 4 * (1 + 1e-9), count < 1 - 1e-9
    np.testing.assert_allclose(inv_freq[left], base[left], rtol=1e-12)
    np.testing.assert_allclose(inv_freq[divided], base[divided] / factor, rtol=1e-12)


@few
@given(geometry=geometries(), factor=factors)
def test_ntk_slows_the_slowest_pair_by_the_factor_and_keeps_the_fastest(geometry, factor):
    inv_freq, base = scale(geometry, ScalingSpec("ntk", factor)).inv_freq, geometry.inv_freq()
    assert inv_freq[0] == base[0] == 1.0
    assert base[-1] / inv_freq[-1] == pytest.approx(factor, rel=1e-9)


@few
@given(geometry=geometries(), factor=factors, share=st.floats(0, 1))
def test_dynamic_is_the_pretrained_rope_up_to_its_window(geometry, factor, share):
    length = max(1, int(share * geometry.original_max_position_embeddings))
    inv_freq = scale(geometry, ScalingSpec("dynamic", factor), length).inv_freq
    np.testing.assert_allclose(inv_freq, geometry.inv_freq(), rtol=1e-12)


@few
@given(geometry=geometries(), factor=factors, beyond=st.floats(1, 50))
def test_dynamic_beyond_its_window_is_ntk_by_the_stretch(geometry, factor, beyond):
    window = geometry.original_max_position_embeddings
    length = math.ceil(window * beyond)
    stretch = max(1.0, factor * length / window - (factor - 1))  # 1 may come out a rounding error less
    inv_freq = scale(geometry, ScalingSpec("dynamic", factor), length).inv_freq
    np.testing.assert_allclose(inv_freq, scale(geometry, ScalingSpec("ntk", stretch)).inv_freq, rtol=1e-9)


@few
@given(geometry=geometries(), factor=factors)
def test_yarn_is_ntk_by_parts_with_a_temperature(geometry, factor):
    yarn, parts = (scale(geometry, ScalingSpec(method, factor)) for method in ("yarn", "ntk-by-parts"))
    np.testing.assert_array_equal(yarn.inv_freq, parts.inv_freq)
    assert parts.attention_factor == 1.0
    assert yarn.attention_factor == pytest.approx(1 + 0.1 * math.log(factor))


@few
@given(geometry=geometries(), factor=factors)
def test_longrope_carries_any_static_method(geometry, factor):
    """Factors of base ÷ wanted frequencies give the wanted frequencies: the universal encoding."""
    wanted = scale(geometry, ScalingSpec("yarn", factor))
    params = {
        "long_factor": (geometry.inv_freq() / wanted.inv_freq).tolist(),
        "attention_factor": wanted.attention_factor,
    }
    carried = scale(geometry, ScalingSpec("longrope", factor, params))
    np.testing.assert_allclose(carried.inv_freq, wanted.inv_freq, rtol=1e-12)
    assert carried.attention_factor == wanted.attention_factor
