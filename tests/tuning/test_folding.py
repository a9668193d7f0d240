"""Gains and phases on really loaded models: live, folded into the weights, and as stock transformers loads them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_settings import LATENT, ONE_OF_EACH, PARTIAL
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from uneven import load_uneven

from ropecli.attention.patching import live_patch
from ropecli.errors import NotFiniteError, PatchError, ProofError
from ropecli.tuning.folding import (
    difference,
    exact_logits,
    find_stored,
    fold,
    logits_of,
)
from ropecli.tuning.heads import HeadGains, find_queries
from ropecli.tuning.procedure import write_tuned

SHARED = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_mem_blocks": 1}
SHARED |= {"use_mem_rope": True, "mamba_d_state": 8, "n_mamba_heads": 2, "mamba_headdim": 64}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# by name: the model type, its settings, and how many gains, phases and gains of other norms there are in all
MODELS = {
    "llama": ("llama", {"head_dim": 32}, 64, 64, 320),
    "bias": ("qwen2", GROUPED, 64, 64, 320),
    "fused, partial": ("phi3", PARTIAL, 32, 32, 320),
    "fused by heads, partial, bias": ("gpt_neox", {"rotary_pct": 0.5}, 32, 32, 320),
    "interleaved": ("cohere", {}, 64, 64, 192),
    "latent": ("deepseek_v3", LATENT, 32, 32, 416),
    "norm of each head": ("qwen3", GROUPED, 16, 0, 352),
    "norm, weight + 1, one layer of two": ("gemma3_text", {"head_dim": 32, **ONE_OF_EACH}, 16, 0, 672),
    "norm over all heads": ("olmo2", {}, 64, 0, 384),
    "norm with a weight of each head": ("cohere", {"use_qk_norm": True}, 32, 0, 256),
    "norm with a bias": ("phi", {"qk_layernorm": True}, 16, 0, 256),
    "one layer without positions": ("smollm3", {"no_rope_layers": [1, 0]}, 32, 32, 320),
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
    plan = run.task.baseline
    live_patch(run.model, plan.positions.ropes)
    gains = HeadGains(run.model, tuple(plan.written))
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in (gains.log_temperature, *gains.log_gain, *gains.phase, *gains.norm_log_gain.values()):
            parameter.copy_(size * torch.randn_like(parameter))
    with gains.live():
        live = logits_of(run.model, run.probe)
    return gains, live


def folded_into(run, gains, live):
    stored = find_stored(run.checkpoint, run.model, gains.weights)
    return fold(run.model, gains.folded(), stored, live, run.probe)


@pytest.fixture
def write(make_run):
    """write(run, folded, output) -> the number of rotary tables that were compared."""

    def write_it(run, folded, output):
        tuned = make_run(run.checkpoint.folder, points=1).tune()
        return write_tuned(replace(tuned, folded=folded), output)

    return write_it


def loaded_logits(folder, run, **options):
    return logits_of(AutoModelForCausalLM.from_pretrained(folder, **options).eval(), run.probe)


def test_weights_that_the_files_dtype_cannot_hold_are_refused(llama, make_run):
    run = make_run(llama)
    gains, live = with_gains(run)
    stored = find_stored(run.checkpoint, run.model, gains.weights)
    narrow = {name: (key, torch.float16) for name, (key, _) in stored.items()}
    large = {name: value * 1e6 for name, value in gains.folded().items()}
    with pytest.raises(NotFiniteError, match=r"too large for the dtype.*Use --level grid"):
        fold(run.model, large, narrow, live, run.probe)


BY_LAYER_TYPE = pytest.mark.transformers("5.9", "yarn by layer type is not read")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=BY_LAYER_TYPE if MODELS[name][0] == "gemma3_text" else ()) for name in MODELS]
)
def test_the_fold_is_exact(build, make_run, tmp_path, name, write):
    model_type, settings, *counts = MODELS[name]
    run = make_run(uneven(build(model_type, **settings)))
    gains, live = with_gains(run)
    learned = (gains.log_gain, gains.phase, gains.norm_log_gain.values())
    assert [sum(parameter.numel() for parameter in group) for group in learned] == counts
    assert difference(logits_of(run.model, run.probe), live) > 0.03  # they do change something
    folded = folded_into(run, gains, live)
    assert folded.rounding == 0
    assert difference(logits_of(run.model, run.probe), live) < 1e-4
    assert write(run, folded, tmp_path / "tuned") > 0
    assert difference(loaded_logits(tmp_path / "tuned", run), live) < 1e-4


def test_a_gain_multiplies_the_logits_of_its_head_as_a_temperature_does(llama, make_run):
    """By hand: all gains of one layer at log 2 are the attention's scaling doubled there."""
    run = make_run(llama)
    gains = HeadGains(run.model, (None,))
    with torch.no_grad():
        gains.log_gain[1].fill_(np.log(2))
    with gains.live():
        live = logits_of(run.model, run.probe)
    run.model.model.layers[1].self_attn.scaling *= 2
    assert difference(logits_of(run.model, run.probe), live) < 1e-4


def test_a_phase_moves_the_position_of_the_query(llama, make_run, monkeypatch):
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
    with torch.no_grad(), gains.live():
        run.model(run.probe, use_cache=False)
    with torch.no_grad():
        run.model(run.probe, position_ids=torch.arange(1, 65)[None], use_cache=False)
    by_phase, _, further, _ = seen
    torch.testing.assert_close(by_phase, further, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gpt_neox_japanese", {}, "has its own attention code"),
        ("hunyuan_v1_dense", {"head_dim": 32}, r"Layer 0 .* changes queries or keys after the rotation"),
        ("stablelm", {"qk_layernorm": True}, "do not come directly from a projection or a norm"),
        ("zamba2", SHARED, "Some layers share the weights of their queries"),
        pytest.param(
            "olmo3",
            {"layer_types": ["sliding_attention"] * 2},
            "No layer rotates by the rotary table of full_attention",
            marks=pytest.mark.transformers("5.14", "olmo3 has one set of RoPE fields"),
        ),
    ],
)
def test_queries_that_cannot_hold_gains_are_refused(build, make_run, model_type, settings, reason):
    run = make_run(uneven(build(model_type, **settings)))
    with pytest.raises(PatchError, match=reason):
        HeadGains(run.model, ("full_attention",) if model_type == "olmo3" else (None,))


def test_shared_and_gated_norms_have_no_gains(build, make_run):
    run = make_run(uneven(build("llama", head_dim=32)))
    first, second = run.model.model.layers
    second.input_layernorm.weight = first.input_layernorm.weight
    first.post_attention_layernorm = _GatedNorm(run.model.config.hidden_size)
    gains, _ = with_gains(run)
    assert set(gains.norm_log_gain) == {"model.layers.1.post_attention_layernorm", "model.norm"}


class _GatedNorm(torch.nn.RMSNorm):
    def forward(self, states, gate=None):
        return super().forward(states) * torch.sigmoid(states if gate is None else gate) + self.weight.sigmoid()


# the rows that give the queries, held against each architecture's own layout, written down by hand

SMALL_LATENT = {**LATENT, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}


def halves(starts, pairs):
    """Pair i of the head that begins at each start is the rows (start + i, start + pairs + i)."""
    first = torch.tensor([[start + pair for pair in range(pairs)] for start in starts])
    return torch.stack([first, first + pairs])


def neighbours(starts, pairs):
    first = torch.tensor([[start + 2 * pair for pair in range(pairs)] for start in starts])
    return torch.stack([first, first + 1])


# model type, settings, module, rows; two heads
KNOWN = {
    "llama": ({"head_dim": 32}, "self_attn.q_proj", halves([0, 32], 16)),
    # queries, keys and values one below the other; the first half of each head turns
    "phi3": (PARTIAL, "self_attn.qkv_proj", halves([0, 32], 8)),
    # head by head its query, key and value; a quarter of each turns
    "gpt_neox": ({"rotary_pct": 0.25}, "attention.query_key_value", halves([0, 96], 4)),
    "cohere": ({}, "self_attn.q_proj", neighbours([0, 32], 16)),
    "glm": ({"head_dim": 32}, "self_attn.q_proj", neighbours([0, 32], 8)),
    # of each head 12 rows that stand still, then 8 that rotate, which transformers takes apart by neighbours
    "deepseek_v3": (SMALL_LATENT, "self_attn.q_b_proj", neighbours([12, 32], 4)),
    "qwen3": ({"head_dim": 32}, "self_attn.q_norm", halves([0], 16)),
    "olmo2": ({}, "self_attn.q_norm", halves([0, 32], 16)),
}


@pytest.mark.parametrize("model_type", KNOWN)
def test_query_rows_follow_the_layout_of_the_architecture(build, model_type):
    settings, module, rows = KNOWN[model_type]
    layers = find_queries(load_uneven(build(model_type, **settings)), {None})
    assert len(layers) == 2
    for layer, queries in enumerate(layers):
        assert queries.name.endswith(f"layers.{layer}.{module}")
        assert torch.equal(queries.rows, rows)
        assert queries.projection == ("norm" not in module)


def sharded(folder, target, dtype=torch.float32):
    AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(target, max_shard_size="100KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


def test_untouched_shards_are_hard_linked_and_other_tensors_stay(build, make_run, tmp_path, write):
    folder = uneven(sharded(build("qwen2", **GROUPED), tmp_path / "sharded"))
    for path in folder.glob("*.safetensors"):
        path.chmod(0o640)
    run = make_run(folder)
    folded = folded_into(run, *with_gains(run))
    write(run, folded, tmp_path / "tuned")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    touched = {index[name] for name in folded.changed}
    assert 0 < len(touched) < len(set(index.values()))
    for name in set(index.values()):
        before, after = folder / name, tmp_path / "tuned" / name
        assert before.samefile(after) == (name not in touched)
        assert after.stat().st_mode == before.stat().st_mode
        tensors, untouched = load_file(after), load_file(before)
        assert tensors.keys() == untouched.keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, untouched[key]) == (key not in folded.changed)
        with safe_open(after, "pt") as file, safe_open(before, "pt") as source:
            assert file.metadata() == source.metadata()


def test_weights_keep_the_files_dtype_and_the_rounding_is_reported(build, make_run, tmp_path, write):
    folder = sharded(build("llama", head_dim=32), tmp_path / "half", torch.bfloat16)
    run = make_run(folder)
    gains, live = with_gains(run)
    folded = folded_into(run, gains, live)
    assert {value.dtype for value in folded.changed.values()} == {torch.bfloat16}
    write(run, folded, tmp_path / "tuned")
    written = loaded_logits(tmp_path / "tuned", run, dtype=torch.float32)
    assert difference(written, folded.logits) < 1e-5
    assert 1e-4 < difference(written, live) < 0.05
    assert folded.rounding == pytest.approx(difference(written, live), rel=0.05)


def test_a_wrong_fold_shows_even_where_half_precision_rounds_more(build, make_run, tmp_path, monkeypatch):
    run = make_run(sharded(build("llama", head_dim=32), tmp_path / "half", torch.bfloat16), dtype="bfloat16")
    gains, _ = with_gains(run, size=0.02)
    with gains.live():
        live = exact_logits(run.model, run.probe)
    assert (live.dtype, run.model.dtype) == (torch.float32, torch.bfloat16)
    unfolded = {name: run.model.get_parameter(name).detach().double() for name in gains.weights}
    monkeypatch.setattr(gains, "folded", lambda: unfolded)
    with pytest.raises(ProofError, match="The logits of the folded weights differ"):
        folded_into(run, gains, live)


@pytest.mark.transformers("5.20", "gemma3 needs token_type_ids in training mode")
def test_a_decoder_whose_files_have_other_names_is_folded(build, make_run, tmp_path, write):
    inner = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
    text = {**inner, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, **ONE_OF_EACH}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    run = make_run(build("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=1))
    gains, live = with_gains(run)
    write(run, folded_into(run, gains, live), tmp_path / "tuned")
    assert difference(loaded_logits(tmp_path / "tuned", run), live) < 1e-4


def test_a_wrongly_written_checkpoint_is_removed(llama, make_run, tmp_path, monkeypatch, write):
    run = make_run(llama)
    folded = folded_into(run, *with_gains(run))
    folded.changed["model.layers.0.self_attn.q_proj.weight"].mul_(1.01)
    with pytest.raises(ProofError, match="The logits of the written checkpoint in stock transformers differ"):
        write(run, folded, tmp_path / "tuned")
    assert not list(tmp_path.iterdir())
