"""The linter: each problem is real, is found by its rule, and is fixed by the printed command."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_settings import TINY

from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.errors import CheckpointError

LLAMA = {**TINY, "model_type": "llama", "head_dim": 32, "rope_theta": 1e4}
LAYERS = ["sliding_attention", "full_attention"]
GEMMA = {
    **TINY,
    "model_type": "gemma3_text",
    "head_dim": 32,
    "max_position_embeddings": 256,
    "layer_types": LAYERS,
    "sliding_window": 32,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
LEFTOVER = {"original_max_position_embeddings": 8192}
VISION = {"model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
RISING = np.linspace(1, 6, 16).tolist()


def yarn(**more: object) -> dict:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **more}


def linear(**more: object) -> dict:
    return {"rope_type": "linear", "factor": 4.0, **more}


def scaled(scaling: dict, base: dict = LLAMA, **more: object) -> dict:
    """A config in both dialects, raised to 256 tokens."""
    new = {"rope_theta": base["rope_theta"], **scaling}
    return {**base, "max_position_embeddings": 256, "rope_scaling": scaling, "rope_parameters": new, **more}


CLEAN = scaled(yarn())
BASE_500K = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}

QWEN = {**LLAMA, "model_type": "qwen3", "rope_theta": 1e6, "max_position_embeddings": 131072}
QWEN_2507 = {**QWEN, "rope_theta": 5e6, "max_position_embeddings": 262144}

# rule, a config with the problem, the nearest config without it, part of the command that fixes it or None
CASES = [
    (
        "one-dialect",
        {key: value for key, value in BASE_500K.items() if key != "rope_theta"},
        {**BASE_500K, "rope_theta": 500000.0},
        "--method none",
    ),
    ("two-scalings", {**CLEAN, "rope_scaling": yarn(factor=2.0)}, CLEAN, ""),
    (
        "outside-text-config",
        {"model_type": "gemma3", "text_config": GEMMA, "vision_config": VISION, "rope_scaling": linear()},
        {"model_type": "gemma3", "text_config": GEMMA, "vision_config": VISION},
        None,
    ),
    (
        "no-text-config",
        {**GEMMA, "model_type": "gemma3", "vision_config": VISION},
        {"model_type": "gemma3", "text_config": GEMMA, "vision_config": VISION},
        None,
    ),
    (
        "no-pretraining-length",
        scaled(linear()),
        scaled(linear(original_max_position_embeddings=64)),
        "--original-length N",
    ),
    (
        "unread-length",
        {**CLEAN, "original_max_position_embeddings": 128},
        {**CLEAN, "original_max_position_embeddings": 64},
        "",
    ),
    (
        "unread-length",
        {**LLAMA, **LEFTOVER},
        {**LLAMA, "original_max_position_embeddings": 64},
        "--method none --output",
    ),
    ("unread-key", scaled(yarn(betafast=2.0)), scaled(yarn(beta_fast=2.0)), ""),
    (
        "unread-length",
        scaled({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}),
        {**LLAMA, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}},
        "",
    ),
    (
        "switches-with-length",
        scaled(yarn(rope_type="longrope", short_factor=[1.0] * 16, long_factor=RISING)),
        scaled(yarn(rope_type="longrope", short_factor=RISING, long_factor=RISING)),
        None,
    ),
    ("context-beyond-scaling", scaled(yarn(factor=2.0)), CLEAN, "--method yarn --target-length 256"),
    ("context-below-scaling", scaled(yarn(factor=8.0)), CLEAN, "--method yarn --factor 8 --output"),
    # Qwen3-4B-2507 reads 262,144 tokens as trained (its model card); Qwen3 is yarn x4 of 32,768 (arXiv:2505.09388)
    (
        "foreign-scaling",
        {**QWEN_2507, "rope_scaling": yarn(original_max_position_embeddings=32768)},
        QWEN_2507,
        "--method unscaled --original-length 262144",
    ),
    (
        "foreign-length",
        {**QWEN, "rope_scaling": yarn(factor=3.2, original_max_position_embeddings=40960)},
        {**QWEN, "rope_scaling": yarn(original_max_position_embeddings=32768)},
        "--method yarn --factor 4 --original-length 32768",
    ),
    (
        "beyond-makers",
        {**QWEN_2507, "max_position_embeddings": 1010000},
        QWEN_2507,
        "--method yarn --factor 4 --output",
    ),
    ("text-for-a-bool", scaled(yarn(truncate="false")), scaled(yarn(truncate=False)), "--set truncate=false"),
]


def findings(folder: Path) -> list[dict]:
    return inspect_checkpoint(read_state(open_checkpoint(folder)))["findings"]


def rules(folder: Path) -> list[str]:
    return [finding["rule"] for finding in findings(folder)]


@pytest.fixture
def fixed(ropecli, tmp_path):
    """fixed("ropecli patch ... --output DIR", N) -> the folder that the command writes."""

    def run(fix: str, original_length: int = 64) -> Path:
        output = tmp_path / f"fixed-{len(list(tmp_path.glob('fixed-*')))}"
        stand_for = {"DIR": str(output), "N": str(original_length)}
        command, *arguments = [stand_for.get(word, word) for word in shlex.split(fix)]
        assert command == "ropecli"
        outcome = ropecli(*arguments)
        assert outcome.code == 0, outcome.err
        return output

    return run


@pytest.mark.parametrize(("rule", "config", "clean", "fix"), [pytest.param(*case, id=case[0]) for case in CASES])
def test_a_problem_is_found_and_the_printed_command_fixes_it(rule, config, clean, fix, written, fixed):
    """With the proof: stock transformers rotates as the fixed config says."""
    faults = findings(written(config))
    command = next(fault["fix"] for fault in faults if fault["rule"] == rule)
    assert rule not in rules(written(clean)), "the clean config has the finding too"
    if fix is None:
        assert command is None
        return
    assert fix in command
    assert set(rules(fixed(command))) <= {fault["rule"] for fault in faults if fault["fix"] is None}


def test_mistrals_own_format_beside_config_json(written, fixed):
    """vLLM reads params.json only where consolidated*.safetensors is."""
    folder = written(CLEAN)
    (folder / "params.json").write_text("{}")
    assert findings(folder) == []
    shutil.copy(folder / "model.safetensors", folder / "consolidated.00.safetensors")
    (finding,) = findings(folder)
    assert (finding["rule"], finding["changes_results"]) == ("mistral-format", True)
    assert (
        "skipping consolidated.00.safetensors, params.json, which engines such as vLLM read instead of"
        in finding["message"]
    )
    assert findings(fixed(finding["fix"])) == []


def test_an_adapter_beside_a_whole_model(llama, tmp_path):
    """transformers loads it too, so the model is another one than config.json and its weights."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder, ids = Path(shutil.copytree(llama, tmp_path / "both")), torch.arange(40)[None]
    before = AutoModelForCausalLM.from_pretrained(folder)
    expected = before(ids).logits
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(before, lora).save_pretrained(folder)
    assert not torch.allclose(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, expected)
    (finding,) = findings(folder)
    assert (finding["rule"], finding["fix"], finding["changes_results"]) == ("adapter-beside-model", None, True)


def test_a_tokenizer_without_a_length_or_with_a_longer_one_is_no_problem(written):
    folder = written(LLAMA)
    for longest in (10**30, "64", None, float("nan")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": longest}))
        assert findings(folder) == [], longest


def test_a_fix_keeps_a_context_length_that_is_no_multiple(written, fixed):
    """Llama 3.1 names a factor of 8 for a window 16 times the pretraining one; the fix must touch neither."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = scaled({**llama3, "original_max_position_embeddings": 8192}, max_position_embeddings=131072)
    assert findings(written(config)) == []
    (finding,) = findings(written({**config, "rope_scaling": None}))
    after = inspect_checkpoint(read_state(open_checkpoint(fixed(finding["fix"]))))
    assert (after["factor"], after["max_position_embeddings"], after["findings"]) == (8.0, 131072, [])


def test_a_factor_and_parameters_are_named_exactly(written, fixed):
    factor = 10 / 3
    config = scaled(
        yarn(factor=factor, beta_fast=16.0, truncate=False, low_freq_factor=1.0),
        max_position_embeddings=round(64 * factor),
    )
    folder = written(config)
    fix = findings(folder)[0]["fix"]
    assert "--set beta_fast=16.0 --set truncate=false --output" in fix
    before, after = (inspect_checkpoint(read_state(open_checkpoint(one))) for one in (folder, fixed(fix)))
    lengths = ("max_position_embeddings", "original_max_position_embeddings")
    for key in ("factor", "inv_freq", "attention_factor", *lengths):
        assert after[key] == before[key], key


@pytest.mark.parametrize("method", ["dynamic", "abf --set beta=50"])
def test_a_tokenizer_with_a_shorter_length(method, written, ropecli, fixed, tmp_path):
    source = written(LLAMA)
    (source / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    assert ropecli("patch", source, "--factor", 4, "--output", tmp_path / "out", "--method", *method.split()).code == 0
    assert "tokenizer-caps" not in rules(tmp_path / "out")
    (tmp_path / "out" / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    (finding,) = [one for one in findings(tmp_path / "out") if one["rule"] == "tokenizer-caps"]
    assert "model_max_length is 64 tokens, below the context length of 256" in finding["message"]
    again = fixed(finding["fix"])
    assert "tokenizer-caps" not in rules(again)
    reports = [inspect_checkpoint(read_state(open_checkpoint(folder))) for folder in (tmp_path / "out", again)]
    assert reports[0]["inv_freq"] == reports[1]["inv_freq"]


def test_one_set_of_parameters_for_several_layer_types_is_refused(written, live):
    """transformers 5 ignores them and uses its defaults, the base included."""
    flat = written({**GEMMA, "rope_parameters": linear(rope_theta=5e5)})
    np.testing.assert_allclose(live(flat)["full_attention"].inv_freq[1], 1e6 ** (-1 / 16), rtol=1e-5)
    with pytest.raises(CheckpointError, match="has one set of RoPE fields"):
        findings(flat)
