"""What the registry refuses, and what it says when it does."""

import math
import re

import numpy as np
import pytest

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import LIST, Knob, get_method, scale, scaling_methods, varies_with_length

GEOMETRY = RopeGeometry(32, 32, 1e4, 64)
ONES = [1.0] * 16
NATIVE = {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}
WITHOUT_A_TYPE = {"custom", "dynamic-yarn", "nope", "p-rope"}
REMAPPING = {"dual-chunk", "leaky-rerope", "lm-infinite", "rerope", "self-extend", "streaming"}
TRAINING = {"no", "a little", "advised", "needed", "needed, at the old window", "by the factors", "by the numbers"}


def refusal(method: str, factor: float = 4.0, **params: object) -> str:
    with pytest.raises(MethodError) as caught:
        scale(GEOMETRY, ScalingSpec(method, factor, params))
    return str(caught.value)


@pytest.mark.parametrize("name", scaling_methods())
def test_every_method_says_what_it_is_and_where_from(name):
    method = get_method(name)
    assert method.name == name
    assert len(method.summary) > 20
    assert method.description.startswith(method.summary.split(" ")[0])
    assert method.training in TRAINING
    for key in method.parameters:
        assert key in method.description, "every parameter is explained"


@pytest.mark.parametrize("name", sorted({*scaling_methods()} - {"custom"}))
def test_a_source_names_a_year_or_an_arxiv_number(name):
    assert re.search(r"\d{4}", get_method(name).source)


@pytest.mark.parametrize("name", scaling_methods())
def test_a_method_has_a_native_type_or_is_known_to_have_none(name):
    rope_type = get_method(name).rope_type
    assert rope_type is None if name in WITHOUT_A_TYPE | REMAPPING else rope_type in NATIVE


def test_which_methods_change_the_distances():
    assert {name for name, method in scaling_methods().items() if method.remaps} == REMAPPING


@pytest.mark.parametrize("name", sorted(REMAPPING))
def test_a_method_of_other_distances_settles_every_parameter(name):
    assert scale(GEOMETRY, ScalingSpec(name, 4.0)).remapping.params.keys() == get_method(name).parameters.keys()


def test_all_the_methods_are_found():
    assert list(scaling_methods()) == [
        "abf", "custom", "dynamic", "dynamic-yarn", "linear", "llama3", "longrope", "none", "nope", "ntk",
        "ntk-by-parts", "p-rope", "yarn",
        "dual-chunk", "leaky-rerope", "lm-infinite", "rerope", "self-extend", "streaming",
    ]  # fmt: skip


def test_other_names_lead_to_one_method_each_and_hide_none():
    others = [other for method in scaling_methods().values() for other in method.other_names]
    assert len(others) == len(set(others)) > 0
    assert not set(others) & set(scaling_methods())


@pytest.mark.parametrize(
    ("typed", "meant"), [("pi", "linear"), ("NTK-aware", "ntk"), ("su", "longrope"), ("DCA", "dual-chunk")]
)
def test_a_name_from_elsewhere_is_refused_with_ours(typed, meant):
    message = refusal(typed)
    assert f"Here it is called {meant!r}." in message
    assert "Did you mean" not in message


def test_the_knobs_of_yarn():
    number = "a positive number of at most 1e+30"
    assert get_method("yarn").knobs == (
        Knob("beta_fast", number, 32.0, False),
        Knob("beta_slow", number, 1.0, False),
        Knob("truncate", "true or false", True, False),
        Knob("attention_factor", number, None, False),
        Knob("mscale", number, None, False),
        Knob("mscale_all_dim", number, None, False),
    )


def test_a_knob_without_a_default_is_required():
    knobs = {knob.name: knob for knob in get_method("longrope").knobs}
    assert knobs["long_factor"] == Knob("long_factor", LIST, None, True)
    assert knobs["short_factor"] == Knob("short_factor", LIST, None, False)


def test_a_method_without_parameters_has_no_knobs():
    assert get_method("linear").knobs == ()


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


@pytest.mark.parametrize("method", ["none", "linear", "ntk", "dynamic", "nope"])
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
    assert "a positive number of at most 1e+30" in message


@pytest.mark.parametrize("value", [0, 1, 1.0, "true", None])
def test_a_flag_must_be_true_or_false(value):
    assert "it must be true or false" in refusal("yarn", truncate=value)


NO_LISTS = {
    "text": "1,2",
    "number": 1.0,
    "texts": ["1"] * 16,
    "nan": [math.nan, *ONES[1:]],
    "infinite": [math.inf, *ONES[1:]],
    "negative": [-1e-9, *ONES[1:]],
    "beyond-use": [1.1e30, *ONES[1:]],
    "true": [True] * 16,
    "false": [False] * 16,
    "missing": [None] * 16,
    "nested": [[0.0]] * 16,
    "object": {"0": 1.0},
}


@pytest.mark.parametrize("value", NO_LISTS.values(), ids=NO_LISTS)
@pytest.mark.parametrize(
    ("method", "key"), [("longrope", "long_factor"), ("custom", "inv_freq"), ("custom", "factors")]
)
def test_a_list_must_hold_numbers_from_0_on(method, key, value):
    message = refusal(method, **{key: value})
    assert f"{method}: {key} is " in message
    assert "it must be a list of numbers from 0 on" in message


def test_a_list_that_is_required_may_not_be_none():
    assert "it must be a list of numbers from 0 on" in refusal("longrope", long_factor=None)


@pytest.mark.parametrize("zero", [0, 0.0])
@pytest.mark.parametrize(
    ("method", "key"), [("longrope", "long_factor"), ("longrope", "short_factor"), ("custom", "factors")]
)
def test_nothing_is_divided_by_zero(method, key, zero):
    params = {"long_factor": ONES} if method == "longrope" else {}
    message = refusal(method, **{**params, key: [*ONES[1:], zero]})
    assert f"{key} holds 0; every factor must be positive" in message


def test_a_frequency_may_be_zero():
    given = [1, *[0.5] * 14, 0]
    np.testing.assert_array_equal(scale(GEOMETRY, ScalingSpec("custom", 4.0, {"inv_freq": given})).inv_freq, given)


@pytest.mark.parametrize("key", ["attention_factor", "short_factor"])
def test_an_optional_parameter_may_be_none(key):
    given = scale(GEOMETRY, ScalingSpec("longrope", 4.0, {"long_factor": ONES, key: None}))
    left_out = scale(GEOMETRY, ScalingSpec("longrope", 4.0, {"long_factor": ONES}))
    assert (given.inv_freq == left_out.inv_freq).all()
    assert given.attention_factor == left_out.attention_factor


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf, 0.0, -4.0, 0.999])
@pytest.mark.parametrize("method", ["none", "linear", "yarn"])
def test_a_factor_must_be_finite_and_at_least_one(method, factor):
    assert "from 1 to 1000000" in refusal(method, factor)


def test_longrope_needs_its_factors():
    message = refusal("longrope")
    assert "long_factor" in message
    assert "--factors-file" in message


@pytest.mark.parametrize(
    ("method", "key"),
    [("longrope", "long_factor"), ("longrope", "short_factor"), ("custom", "inv_freq"), ("custom", "factors")],
)
@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_a_list_needs_one_number_for_each_pair(method, key, length):
    params = {"long_factor": ONES} if method == "longrope" else {}
    message = refusal(method, **{**params, key: [1.0] * length})
    assert f"{key} has {length} entries" in message
    assert "16 rotary pairs" in message


@pytest.mark.parametrize(("params", "given"), [({}, "neither"), ({"beta": 5.0, "rope_theta": 5e5}, "both")])
def test_abf_takes_exactly_one_of_its_two_parameters(params, given):
    assert given in refusal("abf", **params)


@pytest.mark.parametrize(("params", "given"), [({}, "neither"), ({"inv_freq": ONES, "factors": ONES}, "both")])
def test_custom_takes_exactly_one_of_its_two_lists(params, given):
    assert given in refusal("custom", **params)


def test_a_new_base_of_at_most_one_is_refused():
    assert "The new base would be 1;" in refusal("abf", beta=1e-4)


@pytest.mark.parametrize("p", [1.0000001, 75])
def test_p_is_a_share(p):
    assert f"p is {p:g}; it is a share" in refusal("p-rope", p=p)


@pytest.mark.parametrize("alone", ["mscale", "mscale_all_dim"])
def test_the_two_mscales_go_together(alone):
    assert "Give both, or none" in refusal("yarn", **{alone: 1.0})


def test_a_temperature_counts_once():
    assert "would count twice" in refusal("yarn", attention_factor=1.1, mscale=1.0, mscale_all_dim=1.0)


YARNS = ["yarn", "ntk-by-parts", "dynamic-yarn"]


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("method", YARNS)
def test_a_ramp_below_the_fastest_pair_is_refused(method, truncate):
    """Window 64: the fastest pair turns 10.2 times in it. Stock readers leave such pairs alone, or nearly all."""
    message = refusal(method, beta_fast=40.0, beta_slow=20.0, truncate=truncate)
    assert "Every pair turns fewer than beta_slow times in the pretraining window of 64 tokens" in message
    assert "Use linear" in message


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("method", YARNS)
def test_a_ramp_beyond_the_slowest_pair_is_refused(method, truncate):
    """A base of 2: the slowest pair still turns 91,000 times. Stock readers divide every pair by the factor."""
    with pytest.raises(MethodError, match=r"Every pair turns more than beta_fast times.*Use none"):
        scale(RopeGeometry(16, 16, 2.0, 2**20), ScalingSpec(method, 4.0, {"truncate": truncate}))


@pytest.mark.parametrize("method", YARNS)
@pytest.mark.parametrize(("fast", "slow"), [(1.0, 1.0), (1.0, 2.0), (0.5, 1.0)])
def test_beta_fast_must_be_the_larger(method, fast, slow):
    assert "beta_fast must be the larger" in refusal(method, beta_fast=fast, beta_slow=slow)


@pytest.mark.parametrize(("low", "high"), [(4.0, 4.0), (5.0, 4.0)])
def test_high_freq_factor_must_be_the_larger(low, high):
    assert "must be the larger" in refusal("llama3", low_freq_factor=low, high_freq_factor=high)


@pytest.mark.parametrize("method", ["ntk", "dynamic"])
@pytest.mark.parametrize(("width", "still", "turning"), [(2, 0, 1), (8, 3, 1), (8, 4, 0)])
def test_ntk_needs_two_pairs_that_turn(method, width, still, turning):
    with pytest.raises(MethodError, match=rf"two rotary pairs that turn; this model has {turning}\."):
        scale(RopeGeometry(width, width, 1e4, 64, still_pairs=still), ScalingSpec(method, 4.0))


def test_a_base_that_overflows_is_refused():
    # d = 4 squares the factor
    with pytest.raises(MethodError, match="overflow"):
        scale(RopeGeometry(4, 4, 1e300, 64), ScalingSpec("ntk", 1e6))


def test_frequencies_that_overflow_are_refused():
    assert "not finite" in refusal("longrope", long_factor=[1e-320, *ONES[1:]])


@pytest.mark.parametrize(
    ("method", "params", "expected"),
    [
        ("dynamic", {}, True),
        ("dynamic-yarn", {}, True),
        ("longrope", {"long_factor": ONES}, False),
        ("longrope", {"long_factor": ONES, "short_factor": ONES}, False),
        ("longrope", {"long_factor": ONES, "short_factor": [2.0] * 16}, True),
        ("yarn", {}, False),
        ("custom", {"factors": ONES}, False),
    ],
    ids=["dynamic", "dynamic-yarn", "one-list", "equal-lists", "two-lists", "yarn", "custom"],
)
def test_whether_frequencies_switch_with_the_length(method, params, expected):
    assert varies_with_length(GEOMETRY, ScalingSpec(method, 4.0, params)) is expected


@pytest.mark.parametrize("method", ["dynamic", "dynamic-yarn"])
def test_dynamic_without_stretch_does_not_switch(method):
    assert not varies_with_length(GEOMETRY, ScalingSpec(method, 1.0))
