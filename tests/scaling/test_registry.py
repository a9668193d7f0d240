"""Invalid methods and parameters, and the messages."""

import math
import re

import pytest

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method, scaling_methods
from ropecli.scaling.scale import scale, varies_with_length
from ropecli.scaling.spec import make_spec

GEOMETRY = RopeGeometry(32, 32, 1e4, 64)
ONES = [1.0] * 16
REMAPPING = {"dual-chunk", "leaky-rerope", "lm-infinite", "rerope", "self-extend", "streaming", "string"}


def refusal(method: str, factor: float = 4.0, **params: object) -> str:
    with pytest.raises(MethodError) as caught:
        scale(GEOMETRY, make_spec(method, factor, params))
    return str(caught.value)


def test_every_method_says_what_it_is_and_where_from():
    for name, method in scaling_methods().items():
        assert method.name == name
        assert len(method.summary) > 20, name
        assert method.description.startswith(method.summary.split(" ")[0]), name
        assert name == "custom" or re.search(r"\d{4}", method.source), "a year or an arXiv number"
        for key in method.signature:
            assert key in method.description, f"{name} does not explain {key}"


def test_methods_of_other_distances_settle_every_parameter():
    assert {name for name, method in scaling_methods().items() if method.remaps} == REMAPPING
    for name in REMAPPING:
        factor = 4.0 if find_method(name).uses_factor else 1.0
        params = scale(GEOMETRY, make_spec(name, factor)).remapping.params
        assert params.keys() == find_method(name).signature.keys() - {
            "log_n",
            "yarn_temperature",
            "llama4_temperature",
        }


NAMES = {
    # typed -> what the message says
    "yran": "Unknown method 'yran'. Known: abf, ",
    "linaer": "Did you mean 'linear'?",
}


@pytest.mark.parametrize(
    ("typed", "name"),
    [("YaRN", "yarn"), ("NTK-aware", "ntk"), ("pi", "linear"), ("DCA", "dual-chunk"), ("lm_infinite", "lm-infinite")],
)
def test_a_method_has_other_names_in_any_case(typed, name):
    assert find_method(typed).name == name


@pytest.mark.parametrize("typed", NAMES)
def test_an_unknown_method_is_refused_with_ours(typed):
    assert NAMES[typed] in refusal(typed)


COMBINED = ["yarn+resonance", "abf+cope", "abf+yarn", "yarn+dual-chunk", "abf+yarn+cope+resonance+string"]
NOT_COMBINED = {
    "two-by-the-factor": "linear+yarn",
    "base-after-another": "yarn+abf",
    "distances-first": "rerope+yarn",
    "two-distances": "rerope+dual-chunk",
    "by-the-length": "yarn+dynamic",
}


@pytest.mark.parametrize("name", COMBINED)
def test_a_combination_is_a_method_with_the_parameters_of_its_parts(name):
    method, parts = find_method(name), [find_method(part) for part in name.split("+")]
    assert method.name == name
    added = {"frequency_factor"} if parts[-1].remaps else set()
    assert method.signature.keys() == added.union(*(part.signature for part in parts))
    assert len(method.signature) == len(added) + sum(len(part.signature) for part in parts), "no name is in two parts"
    for part in parts:
        assert part.summary in method.summary
        assert part.source in method.source
    for key in method.signature:
        assert key in method.description


@pytest.mark.parametrize("name", NOT_COMBINED.values(), ids=NOT_COMBINED)
def test_what_cannot_be_combined(name):
    assert refusal(name).startswith(f"Cannot combine {name}. Expected at most one of linear, llama3, ntk, ntk-by-parts")


NUMBER, NUMBERS = "expected a positive number of at most 1e+30", "expected a list of non-negative numbers"
RAMP = "Every pair rotates fewer than beta_slow times within the pretraining length of 64 tokens"
REFUSED = {
    "parameter-misspelt": ("yarn", {"betafast": 8.0}, "has no parameter 'betafast'. Its parameters: beta_fast"),
    "parameter-guessed": ("abf", {"theta": 8.0}, "Did you mean 'rope_theta'?"),
    "parameter-left-out": ("longrope", {}, "longrope requires long_factor. Set it with --set or --factors-file"),
    "flag-1": ("yarn", {"truncate": 1}, "yarn: truncate is 1; expected true or false"),
    "list-too-short": ("longrope", {"long_factor": ONES[1:]}, "long_factor has 15 entries; this model has 16 rotary"),
    "long-zero": ("longrope", {"long_factor": [*ONES[1:], 0]}, "long_factor contains 0; expected positive numbers"),
    "abf-neither": ("abf", {}, "neither"),
    "abf-base-of-1": ("abf", {"beta": 1e-4}, "The new base would be 1;"),
    "custom-neither": ("custom", {}, "neither"),
    "p-above-1": ("p-rope", {"p": 1.0000001}, "; expected a share"),
    "mscale-alone": ("yarn", {"mscale": 1.0}, "Set both or neither"),
    "temperature-twice": (
        "yarn",
        {"attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 1.0},
        "both set the attention factor",
    ),
    # Window 64: the fastest pair rotates 10.2 times in it. Stock readers leave nearly all such pairs unchanged.
    "ramp-below": ("yarn", {"beta_fast": 40.0, "beta_slow": 20.0}, RAMP),
    "frequency-factor": ("yarn+rerope", {"frequency_factor": 0}, "frequency_factor is 0; expected a positive number"),
    "clipped-too-many": ("cope", {"clipped_pairs": 17}, "clipped_pairs is 17; this model has 16 rotary pairs"),
    "betas-reversed": ("yarn", {"beta_fast": 0.5}, "beta_fast is 0.5; expected at least beta_slow, 1"),
    "bands-reversed": (
        "llama3",
        {"low_freq_factor": 4.0, "high_freq_factor": 3.0},
        "expected at least low_freq_factor, 4",
    ),
    "not-finite": ("longrope", {"long_factor": [1e-320, *ONES[1:]]}, "not finite"),
}


@pytest.mark.parametrize(("method", "params", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_and_how(method, params, expected):
    assert expected in refusal(method, **params)


def test_a_number_must_be_positive_and_finite():
    for value in ("8", None, True, [8.0], math.nan, math.inf, -math.inf, 0, -1.5, {}):
        assert f"yarn: beta_fast is {value!r}; {NUMBER}" in refusal("yarn", beta_fast=value)


NO_LISTS = {"text": "1,2", "nan": [math.nan, *ONES[1:]], "negative": [-1e-9, *ONES[1:]], "true": [True] * 16}


@pytest.mark.parametrize("value", NO_LISTS.values(), ids=NO_LISTS)
def test_a_list_must_hold_non_negative_numbers(value):
    message = refusal("custom", inv_freq=value)
    assert "custom: inv_freq is " in message
    assert NUMBERS in message


def test_a_factor_must_be_finite_and_at_least_one():
    for factor in (math.nan, math.inf, 0.0, -4.0, 0.999):
        assert "from 1 to 1000000" in refusal("yarn", factor)


def test_a_ramp_beyond_the_slowest_pair_is_refused():
    """With base 2, even the slowest pair rotates 91,000 times. Stock readers divide every pair by the factor."""
    for truncate in (True, False):
        with pytest.raises(MethodError, match=r"Every pair rotates more than beta_fast times.*Use --method none"):
            scale(RopeGeometry(16, 16, 2.0, 2**20), make_spec("dynamic-yarn", 4.0, {"truncate": truncate}))


@pytest.mark.parametrize("method", ["ntk", "dynamic"])
@pytest.mark.parametrize(("width", "still", "rotating"), [(2, 0, 1), (8, 3, 1), (8, 4, 0)])
def test_ntk_requires_two_rotating_pairs(method, width, still, rotating):
    with pytest.raises(MethodError, match=rf"two rotating pairs; this model has {rotating}\."):
        scale(RopeGeometry(width, width, 1e4, 64, still_pairs=still), make_spec(method, 4.0))


def test_a_base_that_overflows_is_refused():
    # d = 4 squares the factor
    with pytest.raises(MethodError, match="overflow"):
        scale(RopeGeometry(4, 4, 1e300, 64), make_spec("ntk", 1e6))


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
    assert varies_with_length(scale(GEOMETRY, make_spec(method, 4.0, params))) is expected
