"""What the registry refuses, and what it says when it does."""

import math
import re

import pytest

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import get_method, scale, scaling_methods, varies_with_length

GEOMETRY = RopeGeometry(32, 32, 1e4, 64)
ONES = [1.0] * 16
NATIVE = {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}


def refusal(method: str, factor: float = 4.0, **params: object) -> str:
    with pytest.raises(MethodError) as caught:
        scale(GEOMETRY, ScalingSpec(method, factor, params))
    return str(caught.value)


@pytest.mark.parametrize("name", scaling_methods())
def test_every_method_says_what_it_is_and_where_from(name):
    method = get_method(name)
    assert method.name == name
    assert len(method.summary) > 20
    assert re.search(r"\d{4}", method.source), "a source names a year or an arXiv number"
    assert method.rope_type in NATIVE


def test_all_the_methods_are_found():
    assert list(scaling_methods()) == [
        "abf", "dynamic", "linear", "llama3", "longrope", "none", "ntk", "ntk-by-parts", "yarn",
    ]  # fmt: skip


@pytest.mark.parametrize(("typed", "meant"), [("yran", "yarn"), ("linaer", "linear"), ("ntk-by-part", "ntk-by-parts")])
def test_an_unknown_method_is_refused_with_a_suggestion(typed, meant):
    message = refusal(typed)
    assert f"{typed!r}" in message
    assert f"Did you mean {meant!r}?" in message


def test_a_method_like_none_of_ours_gets_the_list_alone():
    message = refusal("zzzzzz")
    assert "Did you mean" not in message
    assert all(name in message for name in scaling_methods())


@pytest.mark.parametrize(
    ("method", "typed", "meant"),
    [
        ("yarn", "betafast", "beta_fast"),
        ("yarn", "atention_factor", "attention_factor"),
        ("abf", "theta", "rope_theta"),
    ],
)
def test_an_unknown_parameter_is_refused_with_a_suggestion(method, typed, meant):
    message = refusal(method, **{typed: 8.0})
    assert f"no parameter {typed!r}" in message
    assert f"Did you mean {meant!r}?" in message


@pytest.mark.parametrize("method", ["none", "linear", "ntk", "dynamic"])
def test_methods_without_parameters_take_none(method):
    assert "no parameter 'beta_fast'" in refusal(method, beta_fast=8.0)


@pytest.mark.parametrize("value", ["8", None, True, [8.0], math.nan, math.inf, -math.inf, 0, -1.5, {}])
@pytest.mark.parametrize(
    ("method", "key"),
    [("yarn", "beta_fast"), ("yarn", "beta_slow"), ("ntk-by-parts", "beta_fast"), ("llama3", "low_freq_factor")],
)
def test_a_number_must_be_positive_and_finite(method, key, value):
    message = refusal(method, **{key: value})
    assert f"{key} is {value!r}" in message
    assert "a positive, finite number" in message


@pytest.mark.parametrize("value", [0, 1, 1.0, "true", None])
def test_a_flag_must_be_true_or_false(value):
    assert "it must be true or false" in refusal("yarn", truncate=value)


@pytest.mark.parametrize("value", ["1,2", 1.0, ["1"] * 16, [math.nan, *ONES[1:]], [0.0, *ONES[1:]], [True] * 16, None])
def test_a_list_must_hold_positive_numbers(value):
    assert "it must be a list of positive numbers" in refusal("longrope", long_factor=value)


@pytest.mark.parametrize("key", ["attention_factor", "short_factor"])
def test_an_optional_parameter_may_be_none(key):
    given = scale(GEOMETRY, ScalingSpec("longrope", 4.0, {"long_factor": ONES, key: None}))
    left_out = scale(GEOMETRY, ScalingSpec("longrope", 4.0, {"long_factor": ONES}))
    assert (given.inv_freq == left_out.inv_freq).all()
    assert given.attention_factor == left_out.attention_factor


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf, 0.0, -4.0, 0.999])
@pytest.mark.parametrize("method", ["none", "linear", "yarn"])
def test_a_factor_must_be_finite_and_at_least_one(method, factor):
    assert "at least 1" in refusal(method, factor)


def test_longrope_needs_its_factors():
    message = refusal("longrope")
    assert "long_factor" in message
    assert "--factors-file" in message


@pytest.mark.parametrize("key", ["long_factor", "short_factor"])
@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_longrope_needs_one_factor_for_each_pair(key, length):
    params = {"long_factor": ONES, key: [1.0] * length}
    message = refusal("longrope", **params)
    assert f"{key} has {length} entries" in message
    assert "16 rotary pairs" in message


@pytest.mark.parametrize(("params", "given"), [({}, "neither"), ({"beta": 5.0, "rope_theta": 5e5}, "both")])
def test_abf_takes_exactly_one_of_its_two_parameters(params, given):
    assert given in refusal("abf", **params)


@pytest.mark.parametrize("method", ["yarn", "ntk-by-parts"])
@pytest.mark.parametrize(("fast", "slow"), [(1.0, 1.0), (1.0, 2.0), (0.5, 1.0)])
def test_beta_fast_must_be_the_larger(method, fast, slow):
    assert "beta_fast must be the larger" in refusal(method, beta_fast=fast, beta_slow=slow)


@pytest.mark.parametrize(("low", "high"), [(4.0, 4.0), (5.0, 4.0)])
def test_high_freq_factor_must_be_the_larger(low, high):
    assert "must be the larger" in refusal("llama3", low_freq_factor=low, high_freq_factor=high)


@pytest.mark.parametrize("method", ["ntk", "dynamic"])
def test_ntk_needs_two_pairs(method):
    with pytest.raises(MethodError, match="two rotary pairs"):
        scale(RopeGeometry(2, 2, 1e4, 64), ScalingSpec(method, 4.0))


def test_a_base_that_overflows_is_refused():
    # d = 4 squares the factor
    with pytest.raises(MethodError, match="overflow"):
        scale(RopeGeometry(4, 4, 1e10, 64), ScalingSpec("ntk", 1e200))


def test_frequencies_that_overflow_are_refused():
    assert "not finite" in refusal("longrope", long_factor=[1e-320, *ONES[1:]])


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        ("dynamic", {}, True),
        ("longrope", {"long_factor": ONES}, False),
        ("longrope", {"long_factor": ONES, "short_factor": ONES}, False),
        ("longrope", {"long_factor": ONES, "short_factor": [2.0] * 16}, True),
        ("yarn", {}, False),
    ],
    ids=["dynamic", "one-list", "equal-lists", "two-lists", "yarn"],
)
def test_whether_frequencies_switch_with_the_length(method, params, expected):
    assert varies_with_length(GEOMETRY, ScalingSpec(method, 4.0, params)) is expected


def test_dynamic_without_stretch_does_not_switch():
    assert not varies_with_length(GEOMETRY, ScalingSpec("dynamic", 1.0))
