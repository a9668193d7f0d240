"""Factors never pile up: a config that was scaled already is scaled as the original would be, once.

Without ropecli.yaml, from config.json alone: yarn, llama3 and longrope name the pretraining length in it, and dynamic
leaves it; linear does not, and is told it. ntk and abf leave another base, which nothing in config.json tells from a
pretrained one: they need the note, and are in test_patch_again.py.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import read_state
from ropecli.scaling.spec import ScaledRope, make_spec

PAIRS = 16
LISTS = {"long_factor": np.linspace(1, 6, PAIRS).tolist(), "short_factor": np.linspace(1, 1.3, PAIRS).tolist()}
NAMING_THEIR_WINDOW = {
    "none": {},
    "dynamic": {},
    "yarn": {"beta_fast": 8.0},
    "ntk-by-parts": {"truncate": False},
    "llama3": {"low_freq_factor": 0.5},
    "longrope": LISTS,
    "p-rope": {"p": 0.5},
    "nope": {},
    "custom": {"factors": LISTS["long_factor"]},
}
NATIVE = {"none", "dynamic", "yarn", "ntk-by-parts", "llama3", "longrope"}
"""A combination whose name is read back."""
THEN = {
    **{name: params for name, params in NAMING_THEIR_WINDOW.items() if name != "none"},
    "unscaled": {},
    "linear": {},
    "ntk": {},
    "abf": {"beta": 20.0},
}

few = settings(max_examples=20, deadline=None)
windows = st.integers(16, 2**17)
bases = st.floats(1e3, 1e7)
factors = st.floats(1.01, 200.0)


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory) -> Path:
    """A folder without a note."""
    return tmp_path_factory.mktemp("nowhere")


def llama(window: int, rope_theta: float) -> dict:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "max_position_embeddings": window,
        "rope_theta": rope_theta,
        "rope_scaling": None,
    }


def plan(folder: Path, config: dict, method: str, params: dict, factor: float, **options) -> PatchPlan:
    return make_plan(Checkpoint("model", folder, config), make_spec(method, factor, params), **options)


def assert_same(again: PatchPlan, afresh: PatchPlan) -> None:
    assert again.max_position_embeddings == afresh.max_position_embeddings
    assert again.target_length == afresh.target_length
    for label, rope in afresh.ropes.items():
        assert again.ropes[label].geometry == rope.geometry
        assert again.ropes[label].rope_theta == rope.rope_theta
        assert again.ropes[label].attention_factor == rope.attention_factor
        np.testing.assert_array_equal(again.ropes[label].inv_freq, rope.inv_freq)


@pytest.mark.parametrize("first", NAMING_THEIR_WINDOW)
@few
@given(then=st.sampled_from(sorted(THEN)), window=windows, base=bases, one=factors, other=factors)
def test_scaling_a_scaled_config_is_scaling_the_original_once(nowhere, first, then, window, base, one, other):
    config = llama(window, base)
    if first == "none":
        one = 1.0  # by more it raises the window, and nothing tells that window from a pretrained one
    scaled = plan(nowhere, config, first, NAMING_THEIR_WINDOW[first], one).config
    again, afresh = (plan(nowhere, start, then, THEN[then], other) for start in (scaled, config))
    assert_same(again, afresh)
    if then in NAMING_THEIR_WINDOW:  # read back: what the first one wrote may stand in no key that is read
        read, expected = (_read(nowhere, written.config) for written in (again, afresh))
        np.testing.assert_array_equal(read.inv_freq, expected.inv_freq)
        assert read.attention_factor == expected.attention_factor
        assert read.spec.method.name == expected.spec.method.name
        if then in NATIVE:
            assert read.spec.method.name == then
        np.testing.assert_allclose(read.inv_freq, afresh.ropes[None].inv_freq, rtol=1e-12, atol=1e-29)


@few
@given(then=st.sampled_from(sorted(THEN)), window=windows, base=bases, one=factors, other=factors)
def test_linear_does_not_name_its_window_and_is_told_it(nowhere, then, window, base, one, other):
    config = llama(window, base)
    scaled = plan(nowhere, config, "linear", {}, one)
    again = plan(nowhere, scaled.config, then, THEN[then], other, original_length=window)
    assert_same(again, plan(nowhere, config, then, THEN[then], other))
    untold = plan(nowhere, scaled.config, then, THEN[then], other)
    assert untold.target_length == round(scaled.max_position_embeddings * other)
    assert any("but has no pretraining length" in warning for warning in untold.warnings)


def _read(folder: Path, config: dict) -> ScaledRope:
    ropes = read_state(Checkpoint("model", folder, config)).ropes
    return ropes[None]
