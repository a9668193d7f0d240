"""Both dialects of config.json are read as transformers reads them, and written so that either reader agrees."""

import json

import numpy as np
import pytest
from tiny_settings import TINY
from transformers import CONFIG_MAPPING

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.config.settings import read_settings

ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")


@pytest.mark.parametrize("method", ["yarn", "ntk"])
def test_both_dialects_are_patched_to_the_same_rope(method, llama, edited, patched, config_of):
    older = edited(llama, "older", rope_parameters=..., rope_theta=20000.0, rope_scaling=None)
    newer = edited(llama, "newer", rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    first, second = (config_of(patched(folder, method)) for folder in (older, newer))
    for key in ROPE_FIELDS:
        assert first.get(key) == second.get(key), key
    assert first["rope_theta"] == first["rope_parameters"]["rope_theta"]


def test_a_rope_scaling_that_contradicts_rope_parameters_is_followed_with_a_warning(
    llama, edited, assert_inspection_is_live
):
    folder = edited(
        llama,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64},
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    assert_inspection_is_live(folder)
    messages = [finding.message for finding in read_settings(open_checkpoint(folder).config).findings]
    assert "rope_type is 'linear' in rope_scaling and 'yarn' in rope_parameters; transformers 5 uses" in messages[0]


ALPHA = {"type": "dynamic", "factor": 1.0, "alpha": 1000.0, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("model_type", ["hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "own"])
def test_dynamic_with_alpha_raises_the_base_for_all_lengths(
    model_type, older, written, patched, live, config_of, assert_inspection_is_live
):
    fields = {"rope_theta": 1e4, "rope_scaling": ALPHA} if older else {"rope_parameters": {**ALPHA, "rope_theta": 1e4}}
    folder = written({**TINY, "head_dim": 32, "model_type": model_type, **fields})
    rope = read_state(open_checkpoint(folder)).positions.main
    assert (rope.spec.method.name, rope.rope_theta) == ("none", pytest.approx(1e4 * 1000 ** (32 / 30)))
    if model_type in CONFIG_MAPPING and model_type != "hunyuan_vl_text":  # which no auto class builds alone
        assert_inspection_is_live(folder)
        for method in ("yarn", "none"):
            output = patched(folder, method, original_length=64)
            assert "alpha" not in json.dumps(config_of(output))


@pytest.mark.parametrize("method", ["yarn", "unscaled"])
def test_keys_that_are_no_scaling_stay_in_rope_parameters(method, llama, edited, patched, config_of):
    """Sections of multimodal positions and the like, which other parts of a model read there."""
    kept = {"mrope_section": [4, 6, 6], "llama_4_scaling_beta": 0.1}
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
    folder = edited(llama, rope_parameters={"rope_theta": 1e4, **scaling, **kept})
    parameters = config_of(patched(patched(folder, "linear"), method))["rope_parameters"]
    assert {key: parameters[key] for key in kept} == kept
    assert "beta_fast" not in parameters or method == "yarn"


@pytest.mark.parametrize(
    ("name", "key", "theta"),
    [("gpt_neox", "rotary_pct", "rotary_emb_base"), ("phi", "partial_rotary_factor", "rope_theta")],
)
def test_the_rotary_share_is_kept_in_both_dialects(
    name, key, theta, build, edited, patched, config_of, live, assert_inspection_is_live
):
    older = edited(build(name), rope_parameters=..., **{key: 0.75, theta: 30000.0})
    assert_inspection_is_live(older)
    folder = patched(older, "linear")
    expected = 30000.0 ** (-np.arange(0, 24, 2) / 24) / 4
    np.testing.assert_allclose(live(folder)[None].inv_freq, expected, rtol=2e-6)
    config = config_of(folder)
    assert config[key] == config["rope_parameters"]["partial_rotary_factor"] == config["partial_rotary_factor"] == 0.75
    assert config[theta] == config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 30000.0


def test_other_keys_of_config_json_are_unchanged(llama, edited, patched, config_of):
    source = edited(llama, custom={"a": [1, {"b": None}], "ü": 0.1}, torch_dtype="float32")
    before, after = config_of(source), config_of(patched(source, "yarn"))
    for key in ROPE_FIELDS:
        before.pop(key, None), after.pop(key, None)
    assert after == before
    assert list(after) == list(before)


@pytest.mark.parametrize("method", ["yarn", "ntk"])
def test_a_reader_of_one_dialect_alone_gets_the_same_rope(method, llama, patched, edited, live):
    """transformers 4 does not know rope_parameters, and drops it; a later one may drop rope_scaling."""
    whole = patched(llama, method)
    both = live(whole)[None]
    for removed in ("rope_parameters", "rope_scaling"):
        first = live(edited(whole, removed, **{removed: ...}))[None]
        np.testing.assert_array_equal(first.inv_freq, both.inv_freq)
        assert first.attention_factor == both.attention_factor
