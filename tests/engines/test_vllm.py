"""The vLLM command: by vLLM 0.33.0's rules, it gives the patched frequencies and context length."""

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
    """Parse the command: model, overrides, context length."""
    words = shlex.split(command)
    assert [words[:2], words[3::2]] == [["vllm", "serve"], ["--hf-overrides", "--max-model-len"]]
    return words[2], json.loads(words[4]), int(words[6])


def table(config: dict, max_model_len: int, geometry) -> tuple[np.ndarray, float, float]:
    """inv_freq, what multiplies cos and sin, and the rows of the table: get_rope and its classes, in numpy."""
    told, window = config["rope_parameters"], config["max_position_embeddings"]
    base = told["rope_theta"] ** -(np.arange(0, geometry.rotary_dim, 2) / geometry.rotary_dim)
    original, s = told.get("original_max_position_embeddings"), told.get("factor")
    if told["rope_type"] == "linear":
        assert isinstance(s, float)  # vLLM treats an integer as a list
        return base / s, 1.0, window * s
    if told["rope_type"] == "dynamic":
        stretch = s * window / told.get("max_trained_positions", window) - (s - 1)
        return base ** (1 + math.log(stretch ** (32 / 30)) / math.log(told["rope_theta"])), 1.0, window
    if told["rope_type"] == "yarn":
        ramped = by_parts(geometry, s, told["beta_fast"], told["beta_slow"], told.get("truncate", True))
        return ramped, told.get("attention_factor", 0.1 * math.log(s) + 1), original * s
    if told["rope_type"] == "llama3":
        turns = original * base / (2 * math.pi)
        low, high = told["low_freq_factor"], told["high_freq_factor"]
        smooth = (turns - low) / (high - low)
        between = (1 - smooth) * base / s + smooth * base
        return np.where(turns > high, base, np.where(turns < low, base / s, between)), 1.0, window
    if told["rope_type"] == "longrope":
        long = max_model_len > original
        default = math.sqrt(1 + math.log(window / original) / math.log(original))
        mscale = told.get("long_mscale" if long else "short_mscale", default)
        return base / told["long_factor" if long else "short_factor"], mscale, window
    assert told["rope_type"] == "default"
    return base, 1.0, window


def longest(config: dict) -> float:
    """The context length that vLLM derives; it refuses a larger --max-model-len."""
    told = config["rope_parameters"]
    scaled = told["rope_type"] not in ("longrope", "llama3", "yarn")
    return config["max_position_embeddings"] * (told.get("factor", 1.0) if scaled else 1.0)


def test_the_overrides_make_the_patched_positions(patch, patched):
    folder, rope, checkpoint = patched(patch)
    export = export_checkpoint(checkpoint, "vllm")
    model, overrides, window = parsed(export.command)
    inv_freq, attention_factor, rows = table(overrides, window, rope.geometry)
    assert (model, window, overrides) == (str(folder), TARGET, export.overrides)
    np.testing.assert_allclose(inv_freq, rope.inv_freq, rtol=1e-9, atol=1e-20)
    assert attention_factor == pytest.approx(rope.attention_factor, rel=1e-9)
    assert rows >= TARGET
    assert longest(overrides) >= TARGET


@pytest.mark.parametrize(
    ("patch_name", "said"),
    [
        ("ntk", "vLLM gives the same results without"),
        ("yarn", "vLLM 0.30.0 and later give the same results without"),
        ("linear", f"accepts more than {TARGET} tokens"),
        ("longrope", f"stops at {WINDOW} tokens and ignores attention_factor"),
    ],
)
def test_the_note_on_running_without_options_is_true(patch_name, said, patched):
    """`vllm serve DIR` without options: apply vLLM's rules to the written config."""
    folder, rope, checkpoint = patched(patch_name)
    config = json.loads((folder / "config.json").read_text())
    inv_freq, attention_factor, rows = table(config, TARGET, rope.geometry)
    np.testing.assert_allclose(inv_freq, rope.inv_freq)
    assert rows >= TARGET
    if patch_name == "longrope":
        assert config["original_max_position_embeddings"] == WINDOW
        assert "attention_factor" in config["rope_parameters"]
    else:
        assert attention_factor == pytest.approx(rope.attention_factor)
        assert longest(config) == (4 * TARGET if patch_name == "linear" else TARGET)
    assert said in export_checkpoint(checkpoint, "vllm").notes[0]


def test_two_lists_of_longrope_are_named(patched):
    switching = export_checkpoint(patched("longrope", short_factor=[1.0] * 16).checkpoint, "vllm")
    assert f"once --max-model-len is above {WINDOW}" in switching.cannot[0]
    assert not export_checkpoint(patched("longrope").checkpoint, "vllm").cannot


def test_gpt_oss_with_another_scaling_is_refused(config_only):
    with pytest.raises(PatchError, match="computes only yarn"):
        export_checkpoint(config_only(model_type="gpt_oss", head_dim=32), "vllm")
