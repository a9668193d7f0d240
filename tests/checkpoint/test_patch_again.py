"""A scaled checkpoint is scaled again from what it was before: factors never pile up.

Without ropecli.yaml, yarn, llama3 and longrope name the pretraining length in config.json; dynamic leaves it; linear
needs --original-length. ntk and abf leave another base, which only ropecli.yaml tells from a pretrained one.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.provenance import read_provenance
from ropecli.checkpoint.state import read_state
from ropecli.errors import PatchError
from ropecli.scaling.spec import make_spec

LISTS = {"long_factor": np.linspace(1, 6, 16).tolist(), "short_factor": np.linspace(1, 1.3, 16).tolist()}
NAMING_THEIR_LENGTH = {
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
NATIVE = {"dynamic", "yarn", "ntk-by-parts", "llama3", "longrope"}
THEN = {**NAMING_THEIR_LENGTH, "unscaled": {}, "linear": {}, "ntk": {}, "abf": {"beta": 20.0}}
del THEN["none"]
few = settings(max_examples=15, deadline=None)
lengths, bases, factors = st.integers(16, 2**17), st.floats(1e3, 1e7), st.floats(1.01, 200.0)


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory):
    """A folder without a record."""
    return tmp_path_factory.mktemp("nowhere")


def config_without_scaling(length: int, rope_theta: float) -> dict:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": length}
    return {"model_type": "llama", **sizes, "rope_theta": rope_theta, "rope_scaling": None}


def plan_of(folder, config: dict, method: str, factor: float, **options) -> PatchPlan:
    spec = make_spec(method, factor, {**THEN, "none": {}}[method])
    return make_plan(Checkpoint("model", folder, config), spec, **options)


def assert_same(again: PatchPlan, afresh: PatchPlan) -> None:
    assert again.max_position_embeddings == afresh.max_position_embeddings
    assert again.positions.context_length == afresh.positions.context_length
    for label, rope in afresh.positions.ropes.items():
        assert again.positions.ropes[label].geometry == rope.geometry
        assert again.positions.ropes[label].rope_theta == rope.rope_theta
        assert again.positions.ropes[label].attention_factor == rope.attention_factor
        np.testing.assert_array_equal(again.positions.ropes[label].inv_freq, rope.inv_freq)


@pytest.mark.parametrize("first", NAMING_THEIR_LENGTH)
@few
@given(then=st.sampled_from(sorted(THEN)), length=lengths, base=bases, one=factors, other=factors)
def test_scaling_a_scaled_config_is_scaling_the_original_once(nowhere, first, then, length, base, one, other):
    config = config_without_scaling(length, base)
    # by a factor, none raises the context length, which then looks like a pretraining length
    scaled = plan_of(nowhere, config, first, 1.0 if first == "none" else one).config
    again, afresh = (plan_of(nowhere, start, then, other) for start in (scaled, config))
    assert_same(again, afresh)
    if then in NAMING_THEIR_LENGTH:  # read back
        states = (read_state(Checkpoint("model", nowhere, written.config)) for written in (again, afresh))
        read, expected = (state.positions.ropes[None] for state in states)
        np.testing.assert_array_equal(read.inv_freq, expected.inv_freq)
        assert read.attention_factor == expected.attention_factor
        assert then not in NATIVE or read.spec.method.name == then
        np.testing.assert_allclose(read.inv_freq, afresh.positions.ropes[None].inv_freq, rtol=1e-12, atol=1e-29)


@few
@given(then=st.sampled_from(sorted(THEN)), length=lengths, base=bases, one=factors, other=factors)
def test_linear_does_not_name_its_pretraining_length(nowhere, then, length, base, one, other):
    config = config_without_scaling(length, base)
    scaled = plan_of(nowhere, config, "linear", one)
    again = plan_of(nowhere, scaled.config, then, other, original_length=length)
    assert_same(again, plan_of(nowhere, config, then, other))
    guessed = plan_of(nowhere, scaled.config, then, other)
    assert guessed.positions.context_length == round(scaled.max_position_embeddings * other)
    assert any("but has no pretraining length" in finding.message for finding in guessed.findings)


FIRST = {
    "none": {},
    "linear": {},
    "yarn": {"beta_fast": 8.0, "truncate": False, "attention_factor": 1.3},
    "ntk": {},
    "abf": {"beta": 50.0},
    "longrope": LISTS,
    "dynamic": {},
}


def plan(folder, method="yarn", factor=4.0, **options):
    return make_plan(open_checkpoint(folder), make_spec(method, factor), **options)


@pytest.mark.parametrize("method", FIRST)
def test_with_the_record_a_second_patch_gives_what_the_original_would_give(method, llama, patched, config_of):
    params = FIRST[method]
    folder = patched(llama, method, **params)
    provenance = read_provenance(open_checkpoint(folder))
    assert provenance.original == config_of(llama)
    assert (provenance.method, provenance.factor, provenance.params) == (method, 4.0, params)
    rope = read_state(open_checkpoint(folder)).positions.ropes[None]
    assert rope.spec.method.name == method
    assert (rope.geometry.original_max_position_embeddings, rope.geometry.rope_theta) == (64, 1e4)
    for then in ("none", "linear", "yarn", "ntk", "dynamic"):
        again, afresh = plan(folder, then), plan(llama, then)
        assert (again.config, again.original) == (afresh.config, afresh.original)
        assert_same(again, afresh)


def test_edited_rope_fields_make_the_record_void(llama, patched, edited):
    folder = patched(llama, "yarn")
    assert read_provenance(open_checkpoint(edited(folder, "other", torch_dtype="bfloat16"))).edited == ()
    assert read_provenance(open_checkpoint(edited(folder, rope_scaling=...))).edited == ("rope_scaling",)


def test_an_edited_config_with_an_unknown_base_is_not_scaled_again(llama, patched, edited):
    """The written base would be taken for the pretrained one, and grow once more."""
    changed = edited(patched(llama, "ntk"), max_position_embeddings=300)
    with pytest.raises(PatchError, match=r"patched with ntk.*edited afterwards \(max_position_embeddings\)"):
        plan(changed)


def test_original_length_corrects_max_position_embeddings(llama, edited):
    wrong = edited(llama, max_position_embeddings=512)
    corrected = plan(wrong, "yarn", target_length=256, original_length=64)
    assert (corrected.spec.factor, corrected.max_position_embeddings) == (4.0, 256)
    assert corrected.config["rope_parameters"]["original_max_position_embeddings"] == 64
    np.testing.assert_array_equal(corrected.positions.ropes[None].inv_freq, plan(llama).positions.ropes[None].inv_freq)
