"""Every method's float64 numbers against the functions by which transformers makes its float32 ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScaledRope, make_spec, scale

# What float32 powers of a base near 1e6 lose; and, of the unscaled frequency, what float32 ramps between it and a
# much smaller one lose by cancellation.
RELATIVE = 2e-6
OF_THE_BASE = 2e-7

GEOMETRIES = {
    "whole-head": RopeGeometry(128, 128, 5e5, 8192),
    "part-of-the-head": RopeGeometry(64, 16, 1e4, 2048),
    "tiny-window": RopeGeometry(32, 32, 1e4, 64),  # in which no pair rotates 32 times
    "every-pair-turns": RopeGeometry(32, 32, 1e4, 2**17),
}
WHOLE = GEOMETRIES["whole-head"]
FACTORS = (1.0, 2.5, 32.0)

YARNS = {
    "plain": {},
    "whole-ramp": {"truncate": False},
    "attention-factor": {"attention_factor": 1.37},
    "wide-ramp": {"beta_fast": 64.0, "beta_slow": 0.5},
    "narrow-whole-ramp": {"beta_fast": 8.0, "beta_slow": 2.5, "truncate": False},
    "ramp-on-one-pair": {"beta_fast": 32.0, "beta_slow": 12.0},
    "kimi-k2": {"beta_fast": 1.0, "beta_slow": 1.0},
    "deepseek": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "deepseek-uneven": {"mscale": 0.3, "mscale_all_dim": 2.0},
}


@pytest.fixture(params=GEOMETRIES.values(), ids=GEOMETRIES)
def geometry(request):
    return request.param


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


def test_dynamic_at_lengths_below_at_and_above_the_window(geometry):
    for stretch in (0.02, 1.0, 1.5, 7.3):
        length = max(1, round(stretch * geometry.original_max_position_embeddings))
        ours = scale(geometry, make_spec("dynamic", 4.0), length)
        assert_agrees(ours, stock(geometry, length, rope_type="dynamic", factor=4.0))


@pytest.mark.parametrize("params", YARNS.values(), ids=YARNS)
def test_yarn_ntk_by_parts_and_dynamic_yarn(geometry, params):
    window = geometry.original_max_position_embeddings
    for factor in FACTORS:
        theirs = stock(geometry, rope_type="yarn", factor=factor, original_max_position_embeddings=window, **params)
        assert_agrees(scale(geometry, make_spec("yarn", factor, params)), theirs, OF_THE_BASE)
        ramp = {key: value for key, value in params.items() if key in ("beta_fast", "beta_slow", "truncate")}
        assert_agrees(scale(geometry, make_spec("ntk-by-parts", factor, ramp)), (theirs[0], 1.0), OF_THE_BASE)
        if params == ramp:
            length = round(factor * window)
            assert_agrees(scale(geometry, make_spec("dynamic-yarn", 32.0, ramp), length), theirs, OF_THE_BASE)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (0.5, 9.0), (1.0, 1.0)])  # the last: Llama 4 Scout
def test_llama3(geometry, low, high):
    bands = {"low_freq_factor": low, "high_freq_factor": high}
    window = geometry.original_max_position_embeddings
    for factor in FACTORS:
        theirs = stock(geometry, rope_type="llama3", factor=factor, original_max_position_embeddings=window, **bands)
        assert_agrees(scale(geometry, make_spec("llama3", factor, bands)), theirs, OF_THE_BASE)


@pytest.mark.parametrize("given", ["two-lists", "one-list", "attention-factor"])
def test_longrope_on_both_sides_of_the_window(geometry, given):
    short, long = (np.linspace(1, most, geometry.pairs).tolist() for most in (1.5, 60))
    params = {"long_factor": long, "short_factor": short}
    if given == "one-list":
        del params["short_factor"]
    elif given == "attention-factor":
        params["attention_factor"] = 1.19
    window = geometry.original_max_position_embeddings
    for length in (1, window, window + 1):
        written = {"rope_type": "longrope", "factor": 16.0, "short_factor": long, **params}
        theirs = stock(geometry, length, original_max_position_embeddings=window, **written)
        assert_agrees(scale(geometry, make_spec("longrope", 16.0, params), length), theirs)


@pytest.mark.parametrize("p", [0.25, 0.5, 1.0])
def test_p_rope_is_what_transformers_calls_proportional(p):
    """With a factor, that is p-RoPE interpolated: linear on a model with still pairs."""
    theirs = stock(WHOLE, rope_type="proportional", partial_rotary_factor=p)
    assert (theirs[0] == 0).sum() == (1 - p) * WHOLE.pairs
    assert_agrees(scale(WHOLE, make_spec("p-rope", 4.0, {"p": p})), theirs)
    still = replace(WHOLE, still_pairs=round((1 - p) * WHOLE.pairs))
    theirs = stock(WHOLE, rope_type="proportional", partial_rotary_factor=p, factor=2.5)
    assert_agrees(scale(still, make_spec("linear", 2.5)), theirs)
