"""Checkpoints that ship already scaled are scaled again from their pretraining window, by the fields they have."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ropecli.checkpoint.in_memory import live_patch
from ropecli.checkpoint.plan import effective_ropes, make_plan
from ropecli.checkpoint.reading import open_checkpoint
from ropecli.checkpoint.writing import patch_to
from ropecli.rope import ScalingSpec

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
BANDS = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# The RoPE fields, windows and heads as published.
SHIPPED = {
    "llama-3.1": {
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {**BANDS, "factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "qwen-2.5": {
        "model_type": "qwen2",
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "initial_context_length": 4096,
        "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
    },
    "ministral-3": {
        "model_type": "ministral3",
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 16.0,
            "llama_4_scaling_beta": 0.1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16384,
            "rope_theta": 1000000.0,
            "rope_type": "yarn",
            "type": "yarn",
        },
        "sliding_window": None,
    },
}
ORIGINAL = {
    "llama-3.1": 8192,
    "qwen-2.5": 32768,
    "gpt-oss": 4096,
    "ministral-3": 16384,
}
METHODS = {"yarn": {}, "ntk": {}, "longrope": {"long_factor": np.linspace(1, 9, 64).tolist()}}


@pytest.fixture(params=SHIPPED)
def name(request):
    return request.param


@pytest.fixture
def shipped(name, written):
    return written({**SMALL, **SHIPPED[name]})


def params_of(method: str, name: str) -> dict:
    pairs = 32 if name == "gpt-oss" else 64
    return {key: value[:pairs] if isinstance(value, list) else value for key, value in METHODS[method].items()}


def test_it_is_read_as_stock_transformers_reads_it(name, shipped, assert_inspection_is_live):
    assert_inspection_is_live(shipped)
    ropes, _ = effective_ropes(open_checkpoint(shipped))
    assert {rope.geometry.original_max_position_embeddings for rope in ropes.values()} == {ORIGINAL[name]}


@pytest.mark.parametrize("method", METHODS)
def test_it_is_scaled_from_its_pretraining_window(method, name, shipped, written, patched, live, config_of):
    """As a model that never was scaled, with the window that it was pretrained with."""
    params = params_of(method, name)
    bare = {key: value for key, value in SHIPPED[name].items() if key not in ("rope_scaling", "rope_parameters")}
    theta = SHIPPED[name].get("rope_theta", 1000000.0)
    never = {"rope_theta": theta, "rope_scaling": None, "max_position_embeddings": ORIGINAL[name]}
    if method == "yarn" and name == "ministral-3":
        params = {"mscale": 1.0, "mscale_all_dim": 1.0}  # it keeps the temperature that it was trained with
    afresh = make_plan(open_checkpoint(written({**SMALL, **bare, **never})), ScalingSpec(method, 64.0, params))
    folder = patched(shipped, method, 64.0, **params_of(method, name))
    table, expected = live(folder)[None], afresh.ropes[None]
    np.testing.assert_allclose(table.inv_freq, expected.inv_freq, rtol=2e-5)
    assert table.attention_factor == pytest.approx(expected.attention_factor, rel=1e-6)
    assert config_of(folder)["max_position_embeddings"] == 64 * ORIGINAL[name]


def test_its_own_factor_gives_its_own_frequencies_back(name, shipped, patched, live, config_of):
    config = config_of(shipped)
    own = config.get("rope_scaling") or config["rope_parameters"]
    method = own.get("rope_type") or own["type"]
    params = {"truncate": False} if own.get("truncate") is False else {}
    folder = patched(shipped, method, own["factor"], **params)
    np.testing.assert_allclose(live(folder)[None].inv_freq, live(shipped)[None].inv_freq, rtol=1e-6)
    assert live(folder)[None].attention_factor == pytest.approx(live(shipped)[None].attention_factor, rel=1e-6)


@pytest.mark.parametrize(
    ("method", "params", "warned"),
    [("yarn", {}, True), ("yarn", {"truncate": False}, False), ("linear", {}, False)],
)
def test_parameters_that_it_was_trained_with_are_not_dropped_in_silence(method, params, warned, written):
    source = open_checkpoint(written({**SMALL, **SHIPPED["gpt-oss"]}))
    plan = make_plan(source, ScalingSpec(method, 64.0, params))
    said = "the checkpoint comes with yarn of other parameters; --set truncate=false keeps them."
    assert (said in plan.warnings) is warned


@pytest.mark.parametrize("method", ["linear", "longrope"])
def test_the_attention_of_ministral_still_finds_its_window(method, build, tmp_path):
    """Beside llama_4_scaling_beta it reads the window, whatever the rope_type: queries grow with position // window."""
    parameters = {**SHIPPED["ministral-3"]["rope_parameters"], "factor": 2.0, "original_max_position_embeddings": 16}
    source = build(
        "ministral3", head_dim=32, sliding_window=None, max_position_embeddings=32, rope_parameters=parameters
    )
    params = {"long_factor": np.linspace(1, 4, 16).tolist()} if method == "longrope" else {}
    plan = make_plan(open_checkpoint(source), ScalingSpec(method, 4.0, params))
    patch_to(plan, tmp_path / "out")
    ids = torch.arange(1, 61)[None]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    live_patch(ours, plan.ropes)
    blind = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    blind.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    with torch.no_grad():
        logits, expected, without = (model(ids, use_cache=False).logits for model in (stock, ours, blind))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert (logits - without).abs().max() > 1e-3, "the test's model is deaf to the window"
