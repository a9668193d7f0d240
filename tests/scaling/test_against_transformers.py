"""Every method's float64 numbers against the functions by which transformers makes its float32 ones."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropecli.rope import RopeGeometry, ScaledRope, ScalingSpec
from ropecli.scaling.registry import scale

# What float32 powers of a base near 1e6 lose; and, of the unscaled frequency, what float32 ramps between it and a
# much smaller one lose by cancellation.
RELATIVE = 2e-6
OF_THE_BASE = 2e-7

YARN_VARIANTS = {
    "plain": {},
    "whole-ramp": {"truncate": False},
    "attention-factor": {"attention_factor": 1.37},
    "wide-ramp": {"beta_fast": 64.0, "beta_slow": 0.5},
    "narrow-ramp": {"beta_fast": 8.0, "beta_slow": 2.5},
    "narrow-whole-ramp": {"beta_fast": 8.0, "beta_slow": 2.5, "truncate": False},
}


@pytest.fixture(params=[256, 4096, 8192], ids=lambda window: f"window{window}")
def window(request):
    return request.param


@pytest.fixture(params=[1e4, 5e5, 1e6], ids=lambda theta: f"theta{theta:g}")
def theta(request):
    return request.param


@pytest.fixture(params=[32, 64, 128], ids=lambda width: f"head{width}")
def geometry(request, theta, window):
    return RopeGeometry(request.param, request.param, theta, window)


def stock(geometry: RopeGeometry, length: int | None = None, **parameters: object) -> tuple[np.ndarray, float]:
    """inv_freq and attention factor as transformers makes them."""
    parameters = {"rope_theta": geometry.rope_theta, **parameters}
    if geometry.rotary_dim < geometry.head_dim:
        parameters["partial_rotary_factor"] = geometry.rotary_dim / geometry.head_dim
    config = LlamaConfig(
        hidden_size=2 * geometry.head_dim,
        num_attention_heads=2,
        head_dim=geometry.head_dim,
        max_position_embeddings=geometry.original_max_position_embeddings,
        rope_parameters=parameters,
    )
    make = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    inv_freq, attention_factor = make(config, torch.device("cpu"), seq_len=length)
    return inv_freq.double().numpy(), float(attention_factor)


def assert_agrees(ours: ScaledRope, theirs: tuple[np.ndarray, float], of_the_base: float = 0.0) -> None:
    inv_freq, attention_factor = theirs
    allowed = RELATIVE * ours.inv_freq + of_the_base * ours.geometry.inv_freq()
    error = np.abs(ours.inv_freq - inv_freq)
    assert (error <= allowed).all(), (error / allowed).max()  # a frequency of zero has no error at all
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.5, 32.0])
def test_linear(geometry, factor):
    assert_agrees(scale(geometry, ScalingSpec("linear", factor)), stock(geometry, rope_type="linear", factor=factor))


@pytest.mark.parametrize("stretch", [0.01, 1.0, 1.5, 4.0, 7.3])
def test_dynamic_at_lengths_below_at_and_above_the_window(geometry, stretch):
    length = max(1, round(stretch * geometry.original_max_position_embeddings))
    ours = scale(geometry, ScalingSpec("dynamic", 4.0), length)
    assert_agrees(ours, stock(geometry, length, rope_type="dynamic", factor=4.0))


@pytest.mark.parametrize("factor", [1.0, 4.0, 31.5])
@pytest.mark.parametrize("params", YARN_VARIANTS.values(), ids=YARN_VARIANTS)
def test_yarn(geometry, params, factor):
    window = geometry.original_max_position_embeddings
    theirs = stock(geometry, rope_type="yarn", factor=factor, original_max_position_embeddings=window, **params)
    assert_agrees(scale(geometry, ScalingSpec("yarn", factor, params)), theirs, OF_THE_BASE)


@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 1.0), (0.707, 0.707), (1.0, 0.8), (0.3, 2.0)])
def test_yarn_with_deepseeks_pair_of_mscales(geometry, mscale, mscale_all_dim, factor):
    params = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    window = geometry.original_max_position_embeddings
    theirs = stock(geometry, rope_type="yarn", factor=factor, original_max_position_embeddings=window, **params)
    assert_agrees(scale(geometry, ScalingSpec("yarn", factor, params)), theirs, OF_THE_BASE)


@pytest.mark.parametrize("stretch", [0.1, 1.0, 2.5, 32.0])
def test_dynamic_yarn_is_yarn_by_the_stretch(geometry, stretch):
    window = geometry.original_max_position_embeddings
    length = round(stretch * window)
    factor = max(1.0, length / window)
    theirs = stock(geometry, rope_type="yarn", factor=factor, original_max_position_embeddings=window)
    assert_agrees(scale(geometry, ScalingSpec("dynamic-yarn", 32.0), length), theirs, OF_THE_BASE)


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75, 1.0])
def test_p_rope_is_what_transformers_calls_proportional(geometry, p):
    theirs = stock(geometry, rope_type="proportional", partial_rotary_factor=p)
    assert (theirs[0] == 0).sum() == (1 - p) * geometry.rotary_dim / 2
    assert_agrees(scale(geometry, ScalingSpec("p-rope", 4.0, {"p": p})), theirs)


@pytest.mark.parametrize("factor", [1.0, 2.5, 32.0])
@pytest.mark.parametrize("p", [0.25, 0.75])
def test_linear_on_a_model_with_still_pairs(geometry, p, factor):
    """transformers' `proportional` with a factor is p-RoPE interpolated."""
    still = replace(geometry, still_pairs=round((1 - p) * geometry.pairs))
    theirs = stock(geometry, rope_type="proportional", partial_rotary_factor=p, factor=factor)
    assert_agrees(scale(still, ScalingSpec("linear", factor)), theirs)


@pytest.mark.parametrize("params", [{}, {"beta_fast": 8.0, "beta_slow": 2.5, "truncate": False}], ids=["plain", "set"])
def test_ntk_by_parts_is_yarn_without_temperature(geometry, params):
    theirs = stock(
        geometry,
        rope_type="yarn",
        factor=8.0,
        original_max_position_embeddings=geometry.original_max_position_embeddings,
        attention_factor=1.0,
        **params,
    )
    assert_agrees(scale(geometry, ScalingSpec("ntk-by-parts", 8.0, params)), theirs, OF_THE_BASE)


@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 9.0)])
def test_llama3(geometry, factor, low, high):
    bands = {"low_freq_factor": low, "high_freq_factor": high}
    window = geometry.original_max_position_embeddings
    theirs = stock(geometry, rope_type="llama3", factor=factor, original_max_position_embeddings=window, **bands)
    assert_agrees(scale(geometry, ScalingSpec("llama3", factor, bands)), theirs, OF_THE_BASE)


@pytest.mark.parametrize("attention_factor", [None, 1.19])
@pytest.mark.parametrize("past_the_window", [0, 1], ids=["short", "long"])
def test_longrope_on_both_sides_of_the_window(geometry, past_the_window, attention_factor):
    pairs = geometry.rotary_dim // 2
    short, long = np.linspace(1, 1.5, pairs).tolist(), np.linspace(1, 60, pairs).tolist()
    window = geometry.original_max_position_embeddings
    length = window + past_the_window
    params = {"short_factor": short, "long_factor": long, "attention_factor": attention_factor}
    theirs = stock(
        geometry, length, rope_type="longrope", factor=16.0, original_max_position_embeddings=window, **params
    )
    assert_agrees(scale(geometry, ScalingSpec("longrope", 16.0, params), length), theirs)


def test_one_list_of_longrope_serves_both_sides(geometry):
    factors = np.linspace(1, 60, geometry.rotary_dim // 2).tolist()
    window = geometry.original_max_position_embeddings
    for length in (1, window, window + 1, 16 * window):
        ours = scale(geometry, ScalingSpec("longrope", 16.0, {"long_factor": factors}), length)
        theirs = stock(
            geometry,
            length,
            rope_type="longrope",
            factor=16.0,
            original_max_position_embeddings=window,
            short_factor=factors,
            long_factor=factors,
        )
        assert_agrees(ours, theirs)


@pytest.mark.parametrize(
    ("method", "params"),
    [("linear", {}), ("dynamic", {}), ("yarn", {}), ("llama3", {"low_freq_factor": 1.0, "high_freq_factor": 4.0})],
)
def test_partial_rotation(method, params):
    geometry = RopeGeometry(64, 16, 1e4, 2048)
    length = 8192
    named = {"original_max_position_embeddings": 2048} if method in ("yarn", "llama3") else {}
    theirs = stock(geometry, length, rope_type=method, factor=4.0, **named, **params)
    assert_agrees(scale(geometry, ScalingSpec(method, 4.0, params), length), theirs, OF_THE_BASE)


# What follows has no function of its own in transformers: written out by hand, number by number.


def powers(base: float, width: int) -> list[float]:
    return [math.exp(-2 * i / width * math.log(base)) for i in range(width // 2)]


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_none_leaves_the_powers_of_the_base(geometry, factor):
    ours = scale(geometry, ScalingSpec("none", factor))
    np.testing.assert_allclose(ours.inv_freq, powers(geometry.rope_theta, geometry.rotary_dim), rtol=1e-12)
    assert (ours.attention_factor, ours.rope_theta) == (1.0, geometry.rope_theta)


@pytest.mark.parametrize("factor", [1.0, 4.0, 32.0])
def test_ntk_raises_the_base(geometry, factor):
    width = geometry.rotary_dim
    raised = geometry.rope_theta * math.exp(width / (width - 2) * math.log(factor))
    ours = scale(geometry, ScalingSpec("ntk", factor))
    np.testing.assert_allclose(ours.inv_freq, powers(raised, width), rtol=1e-12)
    assert ours.rope_theta == pytest.approx(raised, rel=1e-12)
    assert ours.attention_factor == 1.0


@pytest.mark.parametrize(
    ("params", "base_of"), [({"beta": 50.0}, lambda b: 50 * b), ({"rope_theta": 2.5e6}, lambda b: 2.5e6)]
)
def test_abf_replaces_the_base_whatever_the_factor(geometry, params, base_of):
    expected = powers(base_of(geometry.rope_theta), geometry.rotary_dim)
    for factor in (1.0, 4.0):
        ours = scale(geometry, ScalingSpec("abf", factor, params))
        np.testing.assert_allclose(ours.inv_freq, expected, rtol=1e-12)
        assert ours.rope_theta == pytest.approx(base_of(geometry.rope_theta))


def test_ntk_by_parts_pair_by_pair(geometry):
    """Equation 19 of the paper, with the ramp over whole pairs that the reference implementation has."""
    width, base, window, s = geometry.rotary_dim, geometry.rope_theta, geometry.original_max_position_embeddings, 8.0
    turning = powers(base, width)
    turns = [window * frequency / (2 * math.pi) for frequency in turning]
    first = max((i for i, n in enumerate(turns) if n >= 32), default=0)
    # Slower pairs than the model has go on in the same geometric row.
    last = next(i for i in range(width) if window * base ** (-2 * i / width) / (2 * math.pi) <= 1 or i == width - 1)
    expected = []
    for i, frequency in enumerate(turning):
        share = min(max((i - first) / (last - first), 0.0), 1.0)
        expected.append((1 - share) * frequency + share * frequency / s)
    ours = scale(geometry, ScalingSpec("ntk-by-parts", s))
    np.testing.assert_allclose(ours.inv_freq, expected, rtol=1e-12)
