"""The makers' pretraining length and extension, by fields of config.json."""

import pytest

from ropecli.checkpoint.inspection import inspect_checkpoint
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.errors import MethodError
from ropecli.scaling.spec import make_spec

SIZES = {"hidden_size": 256, "num_attention_heads": 2}
QWEN2 = {"model_type": "qwen2", "rope_theta": 1e6, "max_position_embeddings": 131072, **SIZES}
QWEN3 = {"model_type": "qwen3", "rope_theta": 1e6, "max_position_embeddings": 40960, "head_dim": 128, **SIZES}
AXES = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
VL = {"model_type": "qwen3_vl_text", "rope_theta": 5e6, "max_position_embeddings": 262144, "head_dim": 128, **SIZES}
QWEN3_VL = {"model_type": "qwen3_vl", "text_config": {**VL, "rope_scaling": {**AXES, "rope_type": "default"}}}
QWEN = {"model_type": "qwen", "rotary_emb_base": 10000, "max_position_embeddings": 32768, **SIZES}
LLAMA = {"model_type": "llama", "rope_theta": 1e5, "max_position_embeddings": 4096, **SIZES}
LLAMA2 = {"model_type": "llama", "max_position_embeddings": 2048, "vocab_size": 32000, "rms_norm_eps": 1e-5}
LLAMA2 |= {"hidden_size": 4096, "num_attention_heads": 32}
MISTRAL = {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": 4096, "max_position_embeddings": 32768}
MISTRAL |= SIZES
LLAMA4 = {"model_type": "llama4_text", "rope_theta": 5e5, "head_dim": 128, "attention_chunk_size": 8192}
LLAMA4 |= {"hidden_size": 5120, "num_attention_heads": 40, "vocab_size": 202048}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 128, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, **SIZES}
STEP = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0}
STEP |= {"original_max_position_embeddings": 8192}
RAMP = {"type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
DEEPSEEK = {**RAMP, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
MLA = {"model_type": "deepseek_v3", "qk_rope_head_dim": 64, "max_position_embeddings": 163840}
GPT_OSS = {"model_type": "gpt_oss", "head_dim": 64, "max_position_embeddings": 131072, "rope_theta": 150000}
DUAL_CHUNK = {"dual_chunk_attention_config": {"chunk_size": 262144, "original_max_position_embeddings": 262144}}
LINEAR = {"rope_scaling": {"type": "linear", "factor": 4.0}}


def known(config: dict, pretraining: int, context: int, scaling: tuple = ("none", 1), **changes) -> tuple:
    return {**config, **changes}, pretraining, context, scaling


KNOWN = {
    "Qwen2.5": known(QWEN2, 32768, 131072),
    "Qwen2.5-1M": known(QWEN2, 262144, 1010000, rope_theta=1e7, max_position_embeddings=1010000, **DUAL_CHUNK),
    "Qwen3": known(QWEN3, 32768, 40960),
    "Qwen": known(QWEN, 8192, 32768, ("dynamic", 4), seq_length=8192, use_dynamic_ntk=True),
    "Mistral v0.1": known(MISTRAL, 8192, 32768),
    "Gemma 3": known({"model_type": "gemma3", "text_config": GEMMA3}, 32768, 131072, ("linear", 8)),
    "Llama 4": known(LLAMA4, 262144, 10485760, ("llama3", 16), max_position_embeddings=10485760, rope_scaling=STEP),
    "Llama 2's first revision": known(LLAMA2, 4096, 2048, pretraining_tp=1),
    "DeepSeek-Coder": known(LLAMA, 4096, 16384, ("linear", 4), max_position_embeddings=16384, **LINEAR),
    "vicuna-16k": known(LLAMA2, 4096, 16384, ("linear", 4), pretraining_tp=1, max_position_embeddings=4096, **LINEAR),
    "Qwen3 without its length beside yarn": known(
        QWEN3, 40960, 40960, ("yarn", 4), rope_scaling={"type": "yarn", "factor": 4.0}
    ),
    "not known": known(LLAMA, 4096, 16384, ("linear", 4), **LINEAR),
}


@pytest.mark.parametrize("name", KNOWN)
def test_lengths_and_scaling_are_those_of_the_makers(name, tmp_path):
    config, pretraining, context, scaling = KNOWN[name]
    state = read_state(Checkpoint("model", tmp_path, config))
    assert (state.positions.pretraining_length, state.positions.context_length) == (pretraining, context)
    assert (state.positions.main.spec.method.name, state.positions.main.spec.factor) == scaling


@pytest.mark.parametrize(("config", "command"), [(QWEN2, "yarn --factor 4"), (QWEN3_VL, "yarn --factor 3")])
def test_inspect_names_both_lengths_their_source_and_the_makers_extension(config, command, tmp_path):
    report = inspect_checkpoint(read_state(Checkpoint("model", tmp_path, config)))
    assert report["makers_extension"]["command"] == f"ropecli patch model --method {command} --output DIR"
    assert report["pretraining_length"] == report["makers_extension"]["original_max_position_embeddings"]
    assert "Qwen" in report["pretraining_length_source"]
    assert report["config_pretraining_length"] == report["max_position_embeddings"]
    assert report["findings"] == []


def test_the_fix_of_a_missing_length_names_the_makers(tmp_path):
    config, *_ = KNOWN["Qwen3 without its length beside yarn"]
    report = inspect_checkpoint(read_state(Checkpoint("model", tmp_path, config)))
    assert "--original-length 32768" in report["findings"][0]["fix"]
    assert "scaled by yarn ×4 from a pretraining length that config.json lacks" in report["limits"][0]


NO_BASE = {"rope_type": "default"}
BASES = {  # what inspect says, and the base of released models if it finds that a problem
    "Llama 3": ({"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 16384}, "500,000"),
    "Qwen2": ({"model_type": "qwen2", "max_position_embeddings": 32768}, "1,000,000"),
    "Llama 2": ({**LLAMA2, "pretraining_tp": 1}, None),
    "not known": ({"model_type": "llama", "max_position_embeddings": 4096}, None),
}


@pytest.mark.parametrize("name", BASES)
def test_a_default_base_is_called_one(name, tmp_path):
    config, released = BASES[name]
    state = read_state(Checkpoint("model", tmp_path, {**SIZES, **config, "rope_parameters": NO_BASE}))
    report = inspect_checkpoint(state)
    sentence = f"config.json names no base (rope_theta): 10,000 is the default of {config['model_type']}."
    if released is None:
        assert (sentence in report["limits"], report["findings"]) == (True, [])
    else:
        [finding] = [finding for finding in report["findings"] if finding["rule"] == "default-base"]
        assert finding["message"].startswith(f"{sentence} Released models of this kind have {released}.")
        assert (finding["fix"], finding["changes_results"]) == (None, True)


NATIVE = {"factor": 4.0, "original_max_position_embeddings": 32768}
IMAGES = {"factor": 3.0, "original_max_position_embeddings": 262144, **AXES}
UNROUNDED = {**RAMP, "factor": 32.0, "truncate": False}
STEPWISE = {**DEEPSEEK, "beta_fast": 1.0, "factor": 32.0}
YARN_OF_MAKERS = {
    "Qwen2.5": (QWEN2, 4.0, NATIVE),
    "Qwen3-VL": (QWEN3_VL, 3.0, IMAGES),
    "DeepSeek": ({**MLA, "rope_theta": 10000, "rope_scaling": DEEPSEEK}, 40, DEEPSEEK),
    "gpt-oss": ({**GPT_OSS, "rope_scaling": UNROUNDED}, 32.0, UNROUNDED),
    # a step instead of a ramp
    "Kimi K2": ({**MLA, "rope_theta": 50000.0, "rope_scaling": STEPWISE}, 64.0, {**STEPWISE, "factor": 64.0}),
}


@pytest.mark.parametrize(("config", "factor", "setting"), YARN_OF_MAKERS.values(), ids=YARN_OF_MAKERS)
def test_yarn_by_the_makers_factor_writes_the_makers_setting(config, factor, setting, tmp_path):
    plan = make_plan(Checkpoint("model", tmp_path, config), make_spec("yarn", factor))
    section = plan.config.get("text_config", plan.config)
    for dialect in ("rope_scaling", "rope_parameters"):
        written = {**section[dialect], "type": "yarn"}
        assert {key: written.get(key) for key in setting} == setting
    added = set(section["rope_scaling"]) - set(setting) - {"rope_type", "type", "beta_fast", "beta_slow"}
    assert not added, "nothing else is set"


def test_the_users_length_overrules_the_makers(tmp_path):
    checkpoint = Checkpoint("model", tmp_path, QWEN2)
    plan = make_plan(checkpoint, make_spec("yarn", 2.0), original_length=131072)
    assert (plan.positions.context_length, plan.findings) == (262144, ())
    warning = make_plan(checkpoint, make_spec("yarn", 4.0)).findings[0].message
    assert warning.startswith("the pretraining length is 32768 tokens (Qwen2 and Qwen2.5 reports")
    with pytest.raises(MethodError, match="yarn ×1 has no effect"):
        make_plan(checkpoint, make_spec("yarn"), target_length=32768)


# A shipped scaling is part of the model.

LLAMA31 = {
    "model_type": "llama",
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "rope_scaling": {**STEP, "factor": 8.0, "high_freq_factor": 4.0},
    **SIZES,
}


def test_none_keeps_the_shipped_scaling_and_unscaled_removes_it(tmp_path):
    checkpoint = Checkpoint("model", tmp_path, LLAMA31)
    kept = make_plan(checkpoint, make_spec("none"), target_length=262144)
    assert (kept.config["rope_scaling"]["rope_type"], kept.config["rope_scaling"]["factor"]) == ("llama3", 8.0)
    assert (kept.positions.context_length, kept.config["max_position_embeddings"]) == (262144, 262144)
    assert any("not trained beyond 131072 tokens" in finding.message for finding in kept.findings)
    assert make_plan(checkpoint, make_spec("none")).positions.context_length == 131072
    removed = make_plan(checkpoint, make_spec("unscaled"), target_length=262144)
    assert removed.config["rope_scaling"] is None
    assert any("replaces the shipped llama3" in finding.message for finding in removed.findings)
