"""The SGLang command: by SGLang 0.5.23's rules, it gives the patched frequencies and context length."""

import json
import math
import shlex

import numpy as np
import pytest

from ropecli.engines.engine_export import export_checkpoint
from ropecli.errors import PatchError
from ropecli.scaling.yarn import by_parts

WINDOW, TARGET = 256, 1024


def parsed(command: str) -> tuple[str, dict, int]:
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    assert words[3::2] == ["--model-path", "--json-model-override-args", "--context-length"]
    return words[4], json.loads(words[6]), int(words[8])


def merged(config: dict, overrides: dict) -> dict:
    return {
        **config,
        **overrides,
        "rope_parameters": {**config["rope_parameters"], **overrides.get("rope_parameters", {})},
    }


def table(config: dict, geometry) -> tuple[np.ndarray, float, float]:
    """inv_freq, what multiplies cos and sin, and the rows of the table: factory.py and its classes, in numpy."""
    told, window = config["rope_parameters"], config["max_position_embeddings"]
    base = told["rope_theta"] ** -(np.arange(0, geometry.rotary_dim, 2) / geometry.rotary_dim)
    original, s = told.get("original_max_position_embeddings"), told.get("factor")
    if told["rope_type"] == "linear":
        assert isinstance(s, float)
        return base / s, 1.0, window * s
    if told["rope_type"] == "dynamic":
        theta = told["rope_theta"] * (s * (window * s) / window - (s - 1)) ** (32 / 30)
        return theta ** -(np.arange(0, 32, 2) / 32), 1.0, window * s
    if told["rope_type"] == "yarn":
        ramped = by_parts(geometry, s, told["beta_fast"], told["beta_slow"], told.get("truncate", True))
        return ramped, (0.1 * math.log(s) + 1) * told.get("attn_factor", 1.0), original * s
    if told["rope_type"] == "longrope":
        default = math.sqrt(1 + math.log(window / original) / math.log(original))
        return base / told["long_factor"], told.get("long_mscale", default), window
    if told["rope_type"] == "llama3":
        turns = original * base / (2 * math.pi)
        low, high = told["low_freq_factor"], told["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - smooth) * base / s + smooth * base, 1.0, window
    assert told["rope_type"] == "default"
    return base, 1.0, window


def longest(config: dict) -> int:
    """get_context_length: above it, --context-length is refused."""
    told = config["rope_parameters"]
    as_it_is = "original_max_position_embeddings" in told or told["rope_type"] == "llama3"
    return int(config["max_position_embeddings"] * (1 if as_it_is else told.get("factor", 1)))


def test_the_overrides_make_the_patched_positions(patch, patched):
    folder, rope, checkpoint = patched(patch)
    export = export_checkpoint(checkpoint, "sglang")
    model, overrides, window = parsed(export.command)
    config = merged(checkpoint.config, overrides)
    inv_freq, attention_factor, rows = table(config, rope.geometry)
    assert (model, window, overrides) == (str(folder), TARGET, export.overrides)
    np.testing.assert_allclose(inv_freq, rope.inv_freq, rtol=1e-9, atol=1e-20)
    assert attention_factor == pytest.approx(rope.attention_factor, rel=1e-9)
    assert rows >= TARGET
    assert longest(config) >= TARGET


@pytest.mark.parametrize(
    ("patch_name", "said"),
    [
        ("ntk", "SGLang gives the same results without"),
        ("yarn with its own attention factor", "ignores attention_factor and uses 0.1·ln s + 1"),
        ("linear", f"accepts more than {TARGET} tokens"),
        ("longrope with its own attention factor", "ignores attention_factor"),
    ],
)
def test_the_note_on_running_without_options_is_true(patch_name, said, patched):
    _, rope, checkpoint = patched(patch_name)
    attention_factor = table(checkpoint.config, rope.geometry)[1]
    if "attention factor" in patch_name and "yarn" in patch_name:
        assert attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert longest(checkpoint.config) == (4 * TARGET if patch_name == "linear" else TARGET)
    assert said in export_checkpoint(checkpoint, "sglang").notes[0]


def test_classes_that_drop_the_scaling_are_refused(config_only):
    scaled = config_only(model_type="gemma2", head_dim=32, rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(PatchError, match="gemma2 reads rope_theta and silently drops"):
        export_checkpoint(scaled, "sglang")
