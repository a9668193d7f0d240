"""config.json names a distance method: transformers runs it after `import ropecli.attention`, and refuses it before."""

import re

import pytest
import torch
from tiny_settings import LATENT
from transformers import AutoConfig, AutoModelForCausalLM

from ropecli.attention.patching import live_patch
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.state import read_state
from ropecli.checkpoint.writing import plan_reversal, revert_to
from ropecli.config.saved_remapping import KEY, SavedRemapping, parse_saved_remapping, read_saved_remapping
from ropecli.errors import CheckpointError
from ropecli.live.loading import load_model
from ropecli.scaling.spec import make_spec

IDS = (torch.arange(1, 141)[None] * 37) % 512
LAYERS = ["sliding_attention", "full_attention"]
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "layer_types": LAYERS, "sliding_window": 20}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LIST = [1.0 + pair / 8 for pair in range(16)]


def plan(folder, method="rerope", factor=4.0, **params):
    return make_plan(open_checkpoint(folder), make_spec(method, factor, params))


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


def assert_is_the_patch_in_memory(output, folder, method="rerope", factor=4.0):
    model = load(folder)
    live_patch(model, plan(folder, method, factor).positions.ropes)
    expected, actual = logits(model), logits(load(output))
    assert (actual - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (actual - logits(load(folder))).abs().max() > 1e-2 * expected.abs().max()


def test_transformers_refuses_the_checkpoint_before_the_import(llama, patched, fork):
    script = "import transformers; transformers.AutoModelForCausalLM.from_pretrained(folder)"
    process = fork(exec, script, {"folder": patched(llama, "rerope")})
    assert process.wait() == 1
    assert re.search("ValueError: .*ropecli:rerope", process.communicate()[1])


def test_config_json_has_the_attention_and_its_parameters(llama, patched, config_of):
    config = config_of(patched(llama, "leaky-rerope", slope=9.0))
    assert config["attn_implementation"] == "ropecli:leaky-rerope"
    assert config[KEY] == {
        "method": "leaky-rerope",
        "params": {"window": 32, "slope": 9.0},
        "pretrained": 64,
        "target": 256,
        "rotary_start": 0,
        "neighbours": False,
    }
    assert config["max_position_embeddings"] == 256
    assert {key: config[key] for key in ("rope_scaling", "rope_theta")} == {"rope_scaling": None, "rope_theta": 1e4}


@pytest.mark.parametrize(("model_type", "settings"), [("gemma3_text", GEMMA), ("deepseek_v3", LATENT)])
def test_the_written_model_computes_what_the_patch_in_memory_does(model_type, settings, build, patched):
    folder = build(model_type, **settings)
    assert_is_the_patch_in_memory(patched(folder, "rerope"), folder)


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("llama", {"rope_type": "llama3", "factor": 2.0, **BANDS}),
        ("phi3", {"rope_type": "longrope", "long_factor": LIST, "short_factor": LIST}),
    ],
)
def test_a_shipped_scaling_stays_and_its_whole_context_is_trained(model_type, rope, build, patched):
    """As Llama 3.1: trained to read 131,072 tokens, from a pretraining length of 8,192, by a factor of 8."""
    rope = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    settings = {"head_dim": 32} if model_type == "llama" else {"original_max_position_embeddings": 64}
    folder = build(model_type, max_position_embeddings=256, rope_parameters=rope, **settings)
    output = patched(folder, "rerope", 8.0)  # of the pretraining length: 512 tokens
    saved = read_saved_remapping(open_checkpoint(output).config)
    assert (saved.pretrained, saved.target, saved.params) == (256, 512, {"window": 128})
    assert_is_the_patch_in_memory(output, folder, factor=8.0)
    assert not any(finding.rule == "not-extended" for finding in plan(folder, factor=8.0).findings)
    (warning,) = [one.message for one in plan(folder, factor=4.0).findings if one.rule == "not-extended"]
    assert "reads 256 tokens" in warning
    assert "--factor above 4." in warning


def test_revert_is_exact_and_another_method_restores_the_attention(llama, edited, patched, config_of, tmp_path):
    attention = {"_attn_implementation": "sdpa"}
    folder = edited(llama, **attention)
    output = patched(folder, "rerope")
    assert AutoConfig.from_pretrained(output)._attn_implementation == "ropecli:rerope"
    revert_to(plan_reversal(open_checkpoint(output)), tmp_path / "back")
    assert config_of(tmp_path / "back") == config_of(folder)
    plain = config_of(patched(output, "yarn"))
    assert {key: plain[key] for key in plain if "attn_impl" in key or key == KEY} == attention


def test_an_invalid_entry_is_refused():
    entry = {"method": "rerope", "params": {"window": 32}, "pretrained": 64, "target": 256, "rotary_start": 0}
    assert parse_saved_remapping(entry, "rerope") == SavedRemapping(**entry)
    for fault, change in (
        ("method is 'self-extend'", {"method": "self-extend"}),
        ("window is 65; expected at most 64", {"params": {"window": 65}}),
        ("pretrained: ", {"pretrained": float("nan")}),
    ):
        with pytest.raises(CheckpointError, match=rf"^{KEY} in config.json is not a valid rerope: .*{fault}.*again"):
            parse_saved_remapping({**entry, **change}, "rerope")


def test_save_pretrained_writes_half_a_saved_remapping_which_is_refused(llama, patched, tmp_path):
    load(patched(llama, "rerope")).save_pretrained(tmp_path / "saved")
    for read in (lambda checkpoint: read_state(checkpoint).positions.ropes, load_model):
        with pytest.raises(CheckpointError, match="save_pretrained omits attn_implementation"):
            read(open_checkpoint(tmp_path / "saved"))
