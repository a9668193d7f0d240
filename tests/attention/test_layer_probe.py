"""What config.json says of each layer, against a small model that is run."""

import json
from dataclasses import replace

import pytest
import scripts_by_path
from transformers import CONFIG_MAPPING

from ropecli.attention.layer_probe import probe_layers, refuse_without_effect
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.config.settings import read_settings
from ropecli.errors import PatchError
from ropecli.scaling.spec import make_spec

coverage = scripts_by_path.load("coverage")
KINDS = {
    "llama": {("full", True)},
    "mistral": {("full", True)},
    "cwm": {("full", True), ("sliding", True)},
    "gemma3_text": {("full", True), ("sliding", True)},
    "cohere2": {("full", False), ("sliding", True)},
    "smollm3": {("full", True), ("full", False)},
    "llama4_text": {("full", False), ("chunked", True)},
    "qwen3_next": {("full", True), ("recurrent", False)},
    "axk2": {("sparse", True)},
}


def config_of(model_type: str):
    narrow = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return coverage.config_of(model_type, **({} if model_type == "axk2" else narrow))


def config_json(model_type: str) -> dict:
    return json.loads(config_of(model_type).to_json_string(use_diff=False))


@pytest.mark.parametrize("model_type", KINDS)
def test_the_fields_say_what_a_small_model_does(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers does not know {model_type}")
    layers = read_settings(config_json(model_type)).layers
    assert {(layer.attention, layer.rotates) for layer in layers} == KINDS[model_type]
    assert layers == probe_layers(config_of(model_type))
    without = {
        key: value for key, value in config_json(model_type).items() if key not in ("layer_types", "no_rope_layers")
    }
    assert read_settings(without).layers == layers  # by the defaults of the model type


def test_a_patch_without_effect_is_refused_by_the_small_model(llama):
    """As if config.json did not say it."""
    plan = make_plan(open_checkpoint(llama), make_spec("yarn", 4.0))
    refuse_without_effect(plan)
    with pytest.raises(PatchError, match=r"no layer that sees the whole context has rotary positions, so yarn has no"):
        refuse_without_effect(replace(plan, original=config_json("cohere2")))
