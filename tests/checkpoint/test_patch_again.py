"""A patched checkpoint is patched again from what it was before: factors never pile up."""

import numpy as np
import pytest

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.provenance import read_provenance
from ropecli.checkpoint.state import read_state
from ropecli.errors import CheckpointError, PatchError
from ropecli.scaling.spec import make_spec

TWO_LISTS = {"long_factor": np.linspace(1, 6, 16).tolist(), "short_factor": np.linspace(1, 1.3, 16).tolist()}
FIRST = {
    "none": ("none", {}),
    "linear": ("linear", {}),
    "yarn": ("yarn", {"beta_fast": 8.0, "truncate": False, "attention_factor": 1.3}),
    "ntk": ("ntk", {}),
    "abf": ("abf", {"beta": 50.0}),
    "longrope": ("longrope", TWO_LISTS),
    "dynamic": ("dynamic", {}),
    "llama3": ("llama3", {}),
}
THEN = {
    "none": ("none", 1.0, {}),
    "linear": ("linear", 8.0, {}),
    "yarn": ("yarn", 3.0, {}),
    "ntk": ("ntk", 2.5, {}),
    "longrope": ("longrope", 4.0, {"long_factor": [2.0] * 16}),
    "dynamic": ("dynamic", 2.0, {}),
}


def plan(folder, method="yarn", factor=4.0, params=None, **options):
    return make_plan(open_checkpoint(folder), make_spec(method, factor, params or {}), **options)


@pytest.fixture(params=FIRST)
def first(request, llama, patched):
    """(method, params, the folder patched with it)"""
    method, params = FIRST[request.param]
    return method, params, patched(llama, method, **params)


def test_a_second_patch_gives_what_the_original_would_give(first, llama):
    for then in THEN.values():
        again, afresh = plan(first[2], *then), plan(llama, *then)
        assert again.config == afresh.config
        assert again.original == afresh.original
        for layer_type, rope in afresh.ropes.items():
            np.testing.assert_array_equal(again.ropes[layer_type].inv_freq, rope.inv_freq)


def test_the_record_has_the_method_and_the_original(first, llama, config_of):
    method, params, folder = first
    provenance = read_provenance(open_checkpoint(folder))
    assert provenance.original == config_of(llama)
    assert (provenance.method, provenance.factor, provenance.params) == (method, 4.0, params)
    state = read_state(open_checkpoint(folder))
    ropes, settings = state.ropes, state.settings
    assert ropes[None].spec.method.name == method
    assert ropes[None].geometry.original_max_position_embeddings == 64
    assert ropes[None].geometry.rope_theta == 1e4
    assert settings.max_position_embeddings == (64 if method == "dynamic" else 256)


def test_without_the_record_a_new_base_is_taken_for_the_pretrained_one(llama, patched):
    """Hence the warning that comes with ntk and abf: keep ropecli.yaml next to the weights."""
    folder = patched(llama, "ntk")
    (folder / "ropecli.yaml").unlink()
    assert read_state(open_checkpoint(folder)).pretraining_length == 256
    assert any("ropecli.yaml" in warning for warning in plan(llama, "ntk").warnings)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_scaling": ...},
        {"rope_parameters": "abc"},
        {"torch_dtype": "bfloat16"},
    ],
    ids=lambda change: "-".join(f"{key}" for key in change),
)
def test_edited_rope_fields_make_the_record_void(change, llama, patched, edited):
    folder = patched(llama, "yarn")
    assert read_provenance(open_checkpoint(folder)).edited == ()
    changed = edited(folder, **change)
    keys = read_provenance(open_checkpoint(changed)).edited
    assert {key.split(".")[0] for key in keys} == set(change) - {"torch_dtype"}


@pytest.mark.parametrize(("method", "params"), [("ntk", {}), ("abf", {"beta": 50})])
def test_a_base_that_is_no_longer_known_is_not_scaled_again(method, params, llama, patched, edited):
    """The written base would be taken for the pretrained one, and grow once more."""
    changed = edited(patched(llama, method, **params), max_position_embeddings=300)
    with pytest.raises(PatchError, match=rf"patched with {method}.*edited afterwards \(max_position_embeddings\)"):
        plan(changed)


def test_a_broken_note_is_an_error_that_says_what_to_do(llama, patched):
    folder = patched(llama, "yarn")
    for text in (
        "",
        "{",
        "changes: 5\n",
        "changes: []\nscaling: {method: yarn, factor: many, params: {}}\n",
        "!!python/object/apply:os.system ['true']\n",
    ):
        (folder / "ropecli.yaml").write_text(text)
        with pytest.raises(CheckpointError, match=r"(?s)ropecli\.yaml cannot be read.*Delete it"):
            plan(folder)


def test_original_length_corrects_a_config_that_lies(llama, edited):
    lying = edited(llama, max_position_embeddings=512)
    corrected = plan(lying, "yarn", target_length=256, original_length=64)
    assert corrected.spec.factor == 4.0
    assert corrected.max_position_embeddings == 256
    assert corrected.config["rope_parameters"]["original_max_position_embeddings"] == 64
    np.testing.assert_array_equal(corrected.ropes[None].inv_freq, plan(llama).ropes[None].inv_freq)
