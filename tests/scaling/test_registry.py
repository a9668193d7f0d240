"""The registry: names, combinations, and what is refused."""

import math
import re

import pytest

from ropecli.errors import MethodError
from ropecli.names import METHODS
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method, scaling_methods
from ropecli.scaling.spec import make_spec, scale, varies_with_length
from ropecli.scaling.temperature import TEMPERATURES

GEOMETRY = RopeGeometry(32, 32, 1e4, 64)
ONES = [1.0] * 16
REMAPPING = {"dual-chunk", "jet-long", "leaky-rerope", "lm-infinite", "rerope", "self-extend", "streaming", "string"}


def refusal(method: str, factor: float = 4.0, geometry: RopeGeometry = GEOMETRY, **params: object) -> str:
    with pytest.raises(MethodError) as caught:
        scale(geometry, make_spec(method, factor, params))
    return str(caught.value)


def test_distance_methods_resolve_every_parameter():
    assert {name for name, method in scaling_methods().items() if method.remaps} == REMAPPING
    for name in REMAPPING:
        factor = 4.0 if find_method(name).uses_factor else 1.0
        params = scale(GEOMETRY, make_spec(name, factor)).remapping.params
        assert params.keys() == find_method(name).signature.keys() - set(TEMPERATURES)


def test_the_names_that_are_checked_without_the_methods_are_theirs():
    assert [*METHODS] == [*scaling_methods()]
    assert all(scaling_methods()[name].other_names == others for name, others in METHODS.items())


@pytest.mark.parametrize(("typed", "name"), [("YaRN", "yarn"), ("pi", "linear"), ("lm_infinite", "lm-infinite")])
def test_a_method_has_other_names_in_any_case(typed, name):
    assert find_method(typed).name == name


@pytest.mark.parametrize("name", ["linear+yarn", "yarn+abf", "rerope+yarn", "rerope+dual-chunk", "yarn+dynamic"])
def test_methods_that_cannot_be_combined_are_refused(name):
    assert refusal(name).startswith(f"Cannot combine {name}. Expected at most one of linear, llama3, ntk, ntk-by-parts")


RAMP = "No pair rotates between beta_slow, 20, and beta_fast, 40, times within the pretraining length of 64 tokens"
TWICE = {"attention_factor": 1.1, "mscale": 1.0, "mscale_all_dim": 1.0}
REFUSED = {
    "flag": ("yarn", {"truncate": 1}, "yarn: truncate is 1; expected true or false"),
    "zero-divisor": (
        "longrope",
        {"long_factor": [*ONES[1:], 0]},
        "16 entries, the smallest 0; this model has 16 rotary",
    ),
    "list": ("custom", {"inv_freq": [math.nan, *ONES[1:]]}, "expected a list of non-negative numbers"),
    "abf-base-of-1": ("abf", {"beta": 1e-4}, "abf with factor 4 gives frequencies or a base"),
    "custom-neither": ("custom", {}, "neither"),
    "mscale-alone": ("yarn", {"mscale": 1.0}, "Set mscale and mscale_all_dim together"),
    "temperature-twice": ("yarn", TWICE, "without attention_factor"),
    # Window 64: the fastest pair rotates 10.2 times in it. Stock readers leave nearly all such pairs unchanged.
    "ramp-below": ("yarn", {"beta_fast": 40.0, "beta_slow": 20.0}, RAMP),
    "clipped-too-many": ("cope", {"clipped_pairs": 17}, "clipped_pairs is 17; this model has 16 rotary pairs"),
    "bands-reversed": ("llama3", {"low_freq_factor": 5.0}, "expected at least low_freq_factor, 5"),
    "not-finite": ("longrope", {"long_factor": [1e-320, *ONES[1:]]}, "not usable"),
}


@pytest.mark.parametrize(("method", "params", "expected"), REFUSED.values(), ids=REFUSED)
def test_invalid_parameters_are_refused(method, params, expected):
    assert expected in refusal(method, **params)


def test_a_number_must_be_positive_and_finite_and_a_factor_at_least_one():
    for value in ("8", None, True, [8.0], math.nan, math.inf, 0, -1.5):
        expected = f"yarn: beta_fast is {value!r}; expected a positive number of at most 1e+30"
        assert expected in refusal("yarn", beta_fast=value)
    for factor in (math.nan, math.inf, 0.999):
        assert "from 1 to 1000000" in refusal("yarn", factor)


def test_a_geometry_that_a_method_cannot_scale_is_refused():
    # with base 2, even the slowest pair rotates 91,000 times; stock readers divide every pair by the factor
    message = refusal("dynamic-yarn", geometry=RopeGeometry(16, 16, 2.0, 2**20))
    assert re.search(r"No pair rotates between beta_slow, 1, and beta_fast.*Use --method none", message)
    assert "not usable" in refusal("ntk", 1e6, RopeGeometry(4, 4, 1e300, 64))  # d = 4 squares the factor


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
def test_whether_frequencies_vary_with_the_length(method, params, expected):
    assert varies_with_length(scale(GEOMETRY, make_spec(method, 4.0, params))) is expected
