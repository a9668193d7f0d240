"""Gains and phases on really loaded models: live, folded into the weights, and as stock transformers loads them."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_settings import EXPERTS, LATENT, ONE_OF_EACH, PARTIAL
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from ropecli.attention.patching import live_patch
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import PatchError, ProofError
from ropecli.scaling.spec import make_spec
from ropecli.tuning.learning import Learned
from ropecli.tuning.levels import HeadGains
from ropecli.tuning.procedure import tuned_to
from ropecli.tuning.tune_report import Score
from ropecli.tuning.tuning_run import Logits, difference, finish_learned, in_float32, logits_of, probe_of, refuse_other

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
DEFAULT = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
# by name: the model type, its settings, and how many gains and phases there are in all
MODELS = {
    "llama": ("llama", {"head_dim": 32}, 64, 64),
    "sliding window": ("mistral", {**GROUPED, "sliding_window": 4096}, 64, 64),
    "bias": ("qwen2", GROUPED, 64, 64),
    "fused, partial": ("phi3", PARTIAL, 32, 32),
    "fused by heads, partial, bias": ("gpt_neox", {"rotary_pct": 0.5}, 32, 32),
    "interleaved": ("cohere", {}, 64, 64),
    "latent": ("deepseek_v3", LATENT, 32, 32),
    "latent, interleaved": ("deepseek_v2", LATENT, 32, 32),
    "sinks": ("gpt_oss", {"head_dim": 32, **DEFAULT, **EXPERTS}, 64, 64),
    "norm of each head": ("qwen3", GROUPED, 16, 0),
    "norm, weight + 1, one layer of two": ("gemma3_text", {"head_dim": 32, **ONE_OF_EACH}, 16, 0),
    "norm over all heads": ("olmo2", {}, 64, 0),
    "norm with a weight of each head": ("cohere", {"use_qk_norm": True}, 32, 0),
    "norm with a bias": ("phi", {"qk_layernorm": True}, 16, 0),
    "one layer without positions": ("smollm3", {"no_rope_layers": [1, 0]}, 32, 32),
}


def uneven(folder):
    """Weights that a swapped row, a forgotten bias or norm would show in."""
    torch.manual_seed(1)
    for path in folder.glob("*.safetensors"):
        tensors = {
            name: value * (1 + 0.2 * torch.randn_like(value)) + 0.1 * torch.randn_like(value)
            for name, value in load_file(path).items()
        }
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def with_gains(run, size=0.3):
    """The model's gains at random, and its logits with them live."""
    plan = make_plan(run.checkpoint, make_spec("yarn", run.factor))
    live_patch(run.model, plan.ropes)
    gains = HeadGains(run.model, plan.scaled)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in gains.parameters():
            parameter.copy_(size * torch.randn_like(parameter))
    with gains.live(run.model):
        live = logits_of(run.model, probe_of(run))
    return plan, gains, live


def finished(run, plan, gains, live):
    score = Score(1.0, 1.0, 1.25, 3)
    return finish_learned(run, plan, score, Learned(score, 1), live, gains.folded(run.model))


def loaded_logits(folder, run, **options):
    return logits_of(AutoModelForCausalLM.from_pretrained(folder, **options).eval(), probe_of(run))


@pytest.mark.parametrize("name", MODELS)
def test_the_fold_is_exact(build, make_run, tmp_path, name):
    model_type, settings, gain_count, phase_count = MODELS[name]
    run = make_run(uneven(build(model_type, **settings)))
    plan, gains, live = with_gains(run)
    assert sum(one.numel() for one in gains.log_gain) == gain_count
    assert sum(one.numel() for one in gains.phase) == phase_count
    assert difference(logits_of(run.model, probe_of(run)), live) > 0.03  # they do change something
    tuned = finished(run, plan, gains, live)
    assert tuned.rounding == 0
    assert difference(logits_of(run.model, probe_of(run)), live) < 1e-4
    assert tuned_to(tuned, tmp_path / "tuned") > 0
    assert difference(loaded_logits(tmp_path / "tuned", run), live) < 1e-4


def test_a_gain_multiplies_the_logits_of_its_head_as_a_temperature_does(llama, make_run):
    """By hand: all gains of one layer at log 2 are the attention's scaling doubled there."""
    run = make_run(llama)
    gains = HeadGains(run.model, (None,))
    with torch.no_grad():
        gains.log_gain[1].fill_(np.log(2))
    with gains.live(run.model):
        live = logits_of(run.model, probe_of(run))
    run.model.model.layers[1].self_attn.scaling *= 2
    assert difference(logits_of(run.model, probe_of(run)), live) < 1e-4


def test_a_phase_moves_the_offset_that_a_head_prefers(llama, make_run, monkeypatch):
    """By hand: a phase of ω in every pair is a query one position further on."""
    run, seen = make_run(llama), []
    run.model.set_attn_implementation("eager")
    gains = HeadGains(run.model, (None,))
    with torch.no_grad():
        for phase in gains.phase:
            phase.copy_(run.model.model.rotary_emb.inv_freq.expand_as(phase))
    plain = modeling_llama.eager_attention_forward

    def attend(module, query, *others, **named):
        seen.append(query)
        return plain(module, query, *others, **named)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    with torch.no_grad(), gains.live(run.model):
        run.model(probe_of(run), use_cache=False)
    with torch.no_grad():
        run.model(probe_of(run), position_ids=torch.arange(1, 65)[None], use_cache=False)
    by_phase, _, further, _ = seen
    torch.testing.assert_close(by_phase, further, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gpt_neox_japanese", {}, "attends by code of its own"),
        ("hunyuan_v1_dense", {"head_dim": 32}, r"Layer 0 .* changes queries or keys after the rotation"),
        ("stablelm", {"qk_layernorm": True}, "do not come unchanged from a projection or a norm"),
        ("olmo3", {"layer_types": ["sliding_attention"] * 2}, "No layer turns by the rotary table of full_attention"),
    ],
)
def test_what_cannot_be_folded_is_refused(build, make_run, model_type, settings, reason):
    run = make_run(uneven(build(model_type, **settings)))
    with pytest.raises(PatchError, match=reason):
        HeadGains(run.model, ("full_attention",) if model_type == "olmo3" else (None,))


def sharded(folder, target, dtype=torch.float32):
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(target, max_shard_size="100KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def test_untouched_shards_are_hard_linked_and_the_others_hold_what_they_held(build, make_run, tmp_path):
    folder = uneven(sharded(build("qwen2", **GROUPED), tmp_path / "sharded"))
    for path in folder.glob("*.safetensors"):
        path.chmod(0o640)
    run = make_run(folder)
    tuned = finished(run, *with_gains(run))
    assert set(tuned.changed) == {
        f"model.layers.{layer}.self_attn.q_proj.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    }
    tuned_to(tuned, tmp_path / "tuned")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    touched = {index[name] for name in tuned.changed}
    assert 0 < len(touched) < len(set(index.values()))
    for name in set(index.values()):
        before, after = folder / name, tmp_path / "tuned" / name
        assert (before.stat().st_ino == after.stat().st_ino) == (name not in touched)
        assert after.stat().st_mode == before.stat().st_mode
        tensors, untouched = load_file(after), load_file(before)
        assert tensors.keys() == untouched.keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, untouched[key]) == (key not in tuned.changed)
        with safe_open(after, "pt") as file, safe_open(before, "pt") as plain:
            assert file.metadata() == plain.metadata()


def test_the_files_precision_stays_and_its_rounding_is_told(build, make_run, tmp_path):
    folder = sharded(build("llama", head_dim=32), tmp_path / "half", torch.bfloat16)
    run = make_run(folder)
    plan, gains, live = with_gains(run)
    tuned = finished(run, plan, gains, live)
    assert {value.dtype for value in tuned.changed.values()} == {torch.bfloat16}
    tuned_to(tuned, tmp_path / "tuned")
    found = loaded_logits(tmp_path / "tuned", run, dtype=torch.float32)
    assert difference(found, tuned.logits) < 1e-5
    assert 1e-4 < difference(found, live) < 0.05
    assert tuned.rounding == pytest.approx(difference(found, live), rel=0.05)


@pytest.fixture
def half(build, make_run, tmp_path):
    """half() -> a run of a model in bfloat16, its plan, gains, and logits with them."""

    def make(size):
        run = make_run(sharded(build("llama", head_dim=32), tmp_path / "half", torch.bfloat16), dtype="bfloat16")
        plan, gains, _ = with_gains(run, size)
        with gains.live(run.model), in_float32(run.model, probe_of(run)):
            return run, plan, gains, logits_of(run.model, probe_of(run))

    return make


def test_a_model_in_half_precision_is_proved_in_float32(half, tmp_path):
    """Whose own rounding would be beyond what is allowed, with gains as large as these."""
    run, plan, gains, live = half(size=1.0)
    before = [parameter.data_ptr() for parameter in run.model.parameters()]
    tuned = finished(run, plan, gains, live)
    assert (live.dtype, tuned.logits.dtype) == (torch.float32, torch.bfloat16)
    assert [parameter.data_ptr() for parameter in run.model.parameters()] == before
    assert run.model.dtype == torch.bfloat16
    tuned_to(tuned, tmp_path / "tuned")
    assert difference(loaded_logits(tmp_path / "tuned", run, dtype=torch.bfloat16), tuned.logits) == 0


def test_gains_too_small_for_half_precisions_logits_are_proved_all_the_same(half, tmp_path, monkeypatch):
    """They move the logits by less than bfloat16's rounding does."""
    run, plan, gains, live = half(size=0.02)
    score, plain = Score(1.0, 1.0, 1.25, 3), {name: value.clone() for name, value in run.model.state_dict().items()}
    unfolded = {name: plain[name].double() for name in gains.folded(run.model)}
    with pytest.raises(ProofError, match="The folded weights give other logits"):
        finish_learned(run, plan, score, Learned(score, 1), live, unfolded)
    run.model.load_state_dict(plain)
    tuned = finished(run, plan, gains, live)
    monkeypatch.setattr("ropecli.tuning.procedure.rewrite_shard", lambda changed, source, target: False)
    with pytest.raises(ProofError, match="was not written as it was folded"):
        tuned_to(tuned, tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_a_decoder_inside_a_larger_model(build, make_run, tmp_path):
    """Its files call the weights otherwise than the model does."""
    inner = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    text = {**inner, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, **ONE_OF_EACH}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    folder = build("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=1)
    run = make_run(folder)
    plan, gains, live = with_gains(run)
    tuned = finished(run, plan, gains, live)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(tuned.changed) <= set(file.keys())
    tuned_to(tuned, tmp_path / "tuned")
    assert difference(loaded_logits(tmp_path / "tuned", run), live) < 1e-4


def test_what_was_written_wrong_is_not_left_behind(llama, make_run, tmp_path, monkeypatch):
    run = make_run(llama)
    tuned = finished(run, *with_gains(run))
    tuned.changed["model.layers.0.self_attn.q_proj.weight"].mul_(1.01)
    with pytest.raises(ProofError, match="Stock transformers, loading what was written"):
        tuned_to(tuned, tmp_path / "tuned")
    assert not list(tmp_path.iterdir())


def test_the_coarser_of_two_precisions_is_what_is_allowed():
    exact = Logits(torch.ones(1, 2, 3), torch.float32)
    with pytest.raises(ProofError):
        refuse_other(exact._replace(values=exact.values * torch.nan), exact, "It gives")
    off = Logits(exact.values * 1.01, torch.bfloat16)
    refuse_other(off, exact, "It gives")
    refuse_other(exact, off, "It gives")
    with pytest.raises(ProofError, match=r"off by 0\.01 of the largest, where 0\.0001 is float32's rounding"):
        refuse_other(off._replace(dtype=torch.float32), exact, "It gives")
