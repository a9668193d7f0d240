"""The commands for vLLM and SGLang: by the rules of their releases, they give the patched frequencies and length."""

import json
import math
import shlex

import numpy as np
import pytest

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.engines.engine_export import export_checkpoint
from ropecli.scaling.yarn import by_parts

WINDOW, TARGET = 256, 1024
COMMANDS = {
    "vllm": "vllm serve {0} --hf-overrides {1} --max-model-len 1024",
    "sglang": "python -m sglang.launch_server --model-path {0} --json-model-override-args {1} --context-length 1024",
}


def served(engine: str, config: dict, geometry) -> tuple[np.ndarray, float, float, float]:
    """inv_freq, what multiplies cos and sin, the rows of the table, and the longest context: the engine, in numpy.

    vLLM: get_rope and its classes. SGLang: factory.py, its classes, and get_context_length.
    """
    rope, length = config["rope_parameters"], config["max_position_embeddings"]
    base = rope["rope_theta"] ** -(np.arange(0, geometry.rotary_dim, 2) / geometry.rotary_dim)
    original, s, kind = rope.get("original_max_position_embeddings"), rope.get("factor", 1.0), rope["rope_type"]
    multiplied = kind not in ("longrope", "llama3", "yarn") if engine == "vllm" else not original and kind != "llama3"
    longest = length * (s if multiplied else 1)
    assert isinstance(s, float), "vLLM treats an integer as a list"
    if kind == "linear":
        return base / s, 1.0, length * s, longest
    if kind == "dynamic":
        reached = length if engine == "vllm" else length * s
        stretch = s * reached / (rope.get("max_trained_positions", length)) - (s - 1)
        return base ** (1 + math.log(stretch ** (32 / 30)) / math.log(rope["rope_theta"])), 1.0, reached, longest
    if kind == "yarn":
        ramped = by_parts(geometry, s, rope["beta_fast"], rope["beta_slow"], rope.get("truncate", True))
        default = 0.1 * math.log(s) + 1
        given = rope.get("attention_factor", default) if engine == "vllm" else default * rope.get("attn_factor", 1.0)
        return ramped, given, original * s, longest
    if kind == "longrope":
        default = math.sqrt(1 + math.log(length / original) / math.log(original))
        return base / rope["long_factor"], rope.get("long_mscale", default), length, longest
    if kind == "llama3":
        turns = original * base / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        return (1 - smooth) * base / s + smooth * base, 1.0, length, longest
    assert kind == "default"
    return base, 1.0, length, longest


@pytest.mark.parametrize("engine", COMMANDS)
def test_the_overrides_make_the_patched_positions(engine, patch, patched):
    folder, rope, checkpoint = patched(patch)
    export = export_checkpoint(checkpoint, engine)
    overrides = json.dumps(export.overrides)
    assert export.command == COMMANDS[engine].format(folder, shlex.quote(overrides))
    # SGLang merges the overrides into rope_parameters, vLLM replaces it
    before = checkpoint.config["rope_parameters"] if engine == "sglang" else {}
    config = {**export.overrides, "rope_parameters": {**before, **export.overrides["rope_parameters"]}}
    inv_freq, attention_factor, rows, longest = served(engine, config, rope.geometry)
    np.testing.assert_allclose(inv_freq, rope.inv_freq, rtol=1e-9, atol=1e-20)
    assert attention_factor == pytest.approx(rope.attention_factor, rel=1e-9)
    assert min(rows, longest) >= TARGET


def test_two_lists_of_longrope_give_a_remark(patched):
    switching = export_checkpoint(patched("longrope", short_factor=[1.0] * 16).checkpoint, "vllm")
    assert f"once --max-model-len is above {WINDOW}" in switching.cannot[0]
    assert not export_checkpoint(patched("longrope").checkpoint, "vllm").cannot


@pytest.mark.parametrize(("model_type", "overrides"), [("qwen3", True), ("qwen3_5", False)])
def test_sglang_gets_no_override_within_text_config(qwen, model_type, overrides):
    """At which it crashes (sgl-project/sglang 27974); config.json has the scaling."""
    export = export_checkpoint(open_checkpoint(qwen(model_type, 4)), "sglang")
    assert ("--json-model-override-args" in export.command) == overrides == bool(export.overrides)
    assert any("SGLang reads the scaling from config.json" in note for note in export.notes) != overrides
