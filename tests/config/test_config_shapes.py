"""config.json comes in many shapes: composite, nested, or without a key. Each is read as stock transformers
reads it, and written so that it finds what was meant."""

import json
from collections import Counter

import numpy as np
import pytest
from tiny_settings import TINY

from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.config.families import family_of
from ropecli.config.layers import read_layers
from ropecli.errors import PatchError, RopecliError
from ropecli.scaling.spec import make_spec

LAYERS = ["sliding_attention", "full_attention"]


def warnings_of(folder) -> str:
    return "\n".join(finding.message for finding in read_state(open_checkpoint(folder)).findings)


# Models with pairs that were pretrained without rotation.

PROPORTIONAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
# As published: the width of its global heads by a name of its own, from which transformers makes another form.
STILL = {
    **TINY,
    "model_type": "gemma4_text",
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": LAYERS,
    "sliding_window": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "rope_parameters": PROPORTIONAL,
}
ROTATING = 8  # of 32 pairs: a quarter of a head 64 wide


def test_a_method_that_keeps_still_pairs_is_written_natively(
    written, patched, config_of, live, assert_inspection_is_live
):
    source = written(STILL)
    assert_inspection_is_live(source)
    folder = patched(source, "ntk")
    assert_inspection_is_live(folder)
    before, after = live(source)["full_attention"].inv_freq, live(folder)["full_attention"].inv_freq
    np.testing.assert_array_equal(after[ROTATING:], 0.0)
    assert after[ROTATING - 1] == pytest.approx(before[ROTATING - 1] / 4, rel=2e-6)
    parameters = config_of(folder)["rope_parameters"]["full_attention"]
    assert (parameters["rope_type"], parameters["partial_rotary_factor"]) == ("proportional", 0.25)


# Which layers rotate, by the fields of each layer.

FAR_LAYERS = {
    "Llama 4 as released": ({"model_type": "llama4_text", "attention_chunk_size": 32, "num_hidden_layers": 4}, False),
    "Granite, base 0 in the far layers": (
        {"model_type": "granite_swa", "layer_rope_theta": [1e4, 0], "layer_types": LAYERS},
        False,
    ),
    "Command, whose first layer is dense": ({"model_type": "cohere2_moe", "first_k_dense_replace": 1}, True),
}


@pytest.mark.parametrize("name", FAR_LAYERS)
def test_a_scaling_without_effect_on_distant_tokens_is_refused(name, tmp_path):
    config, rotates = FAR_LAYERS[name]
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "rope_theta": 1e4, **config}))
    source = open_checkpoint(tmp_path)
    limits = inspect_checkpoint(read_state(source))["limits"]
    assert any("so a scaling has no effect on distant tokens" in limit for limit in limits) is not rotates
    if rotates:
        make_plan(source, make_spec("yarn", 4.0))
    else:
        with pytest.raises(PatchError, match=r"so yarn has no effect on distant tokens\. Use --method none"):
            make_plan(source, make_spec("yarn", 4.0))
    assert make_plan(source, make_spec("none", 4.0)).config["max_position_embeddings"] == 256


FORMS = {
    "Bamba": (
        {"model_type": "bamba", "num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27]},
        (3, "full"),
        (29, "recurrent"),
    ),
    "Jamba": (
        {"model_type": "jamba", "num_hidden_layers": 16, "attn_layer_period": 8, "attn_layer_offset": 4},
        (2, "full"),
        (14, "recurrent"),
    ),
    "Nemotron-H": (
        {"model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M-M*-"},
        (1, "full"),
        (2, "recurrent"),
        (2, "other"),
    ),
    "DeepSeek-V4": (
        {"model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]},
        (1, "sliding"),
        (2, "compressed"),
    ),
    "Qwen2, which slides from layer 24": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 512, "max_window_layers": 24},
        (24, "full"),
        (8, "sliding"),
    ),
    "of an unknown type and number": ({"model_type": "my_own", "full_attn_idxs": [1]}, (1, "full"), (1, "recurrent")),
}


@pytest.mark.parametrize("name", FORMS)
def test_layers_are_read_in_the_forms_of_released_configs(name):
    config, *kinds = FORMS[name]
    layers = read_layers(config, family_of(config))
    assert Counter(layer.attention for layer in layers) == {kind: count for count, kind in kinds}


BASES = {"rope_theta": 30000.0, "layer_rope_theta": [30000.0, 50000.0], "layer_types": LAYERS, "sliding_window": 32}
SCALED = {"rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("granite_swa", BASES, "layer_rope_theta .* expected the same base for all layers"),
        ("gpt_oss", {}, "gpt_oss is scaled by default"),
        ("granitemoehybrid", {}, "position_embedding_type in config.json is not 'rope'"),
        ("my_own", {}, "no RoPE field that ropecli knows .* no language model of type 'my_own'. .* custom code"),
        ("my_own", SCALED, "has no rope_theta.*Add the base that the model was trained with"),
        ("llava", {"rope_theta": 20000.0}, "no text_config, and transformers reads the language model of llava only"),
    ],
)
def test_a_config_with_unknown_meaning_is_refused(model_type, fields, message, written, patched):
    with pytest.raises(RopecliError, match=message):
        patched(written({**TINY, "model_type": model_type, **fields}), "linear")


@pytest.mark.parametrize(
    "model_type",
    ["gpt_neox", pytest.param("olmo3", marks=pytest.mark.transformers("5.14", "olmo3 has one set of RoPE fields"))],
)
def test_a_config_without_rope_fields_is_read_by_the_types_defaults(
    model_type, written, patched, assert_inspection_is_live
):
    config = {**TINY, "model_type": model_type}
    config |= {"layer_types": LAYERS, "sliding_window": 32} if model_type == "olmo3" else {}
    del config["max_position_embeddings"]
    folder = written(config)
    assert_inspection_is_live(folder)
    assert warnings_of(folder) == ""  # every reader has these defaults
    assert_inspection_is_live(patched(folder, "yarn"))
