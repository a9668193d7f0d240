"""The rows that give the queries, held against each architecture's own layout, written down by hand."""

import pytest
import torch
from tiny_settings import LATENT, PARTIAL
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM
from uneven import load_uneven

from ropecli.checkpoint.queries import find_queries
from ropecli.errors import PatchError

SMALL_LATENT = {**LATENT, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
MOSHI = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32, "vocab_size": 96}


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
    # of each head 12 rows that stand still, then 8 that turn, which transformers takes apart by neighbours
    "deepseek_v3": (SMALL_LATENT, "self_attn.q_b_proj", neighbours([12, 32], 4)),
    "qwen3": ({"head_dim": 32}, "self_attn.q_norm", halves([0, 0], 16)),
    "olmo2": ({}, "self_attn.q_norm", halves([0, 32], 16)),
}


@pytest.mark.parametrize("model_type", KNOWN)
def test_the_rows_are_those_of_the_architecture(build, model_type):
    settings, module, rows = KNOWN[model_type]
    found = find_queries(load_uneven(build(model_type, **settings)), {None})
    assert len(found) == 2
    for layer, queries in enumerate(found):
        assert queries.name.endswith(f"layers.{layer}.{module}")
        assert torch.equal(queries.rows, rows)
        assert queries.projection == ("norm" not in module)
        assert queries.shared == (model_type == "qwen3")


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "qwen3"])
def test_half_precision_finds_the_same(build, model_type):
    settings, _, rows = KNOWN[model_type]
    model = load_uneven(build(model_type, **settings), dtype=torch.bfloat16)
    assert torch.equal(find_queries(model, {None})[0].rows, rows)


def test_of_layer_types_only_those_that_are_asked_for(build):
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 32}
    model = load_uneven(build("gemma3_text", **kinds))
    for label, layer in (("sliding_attention", 0), ("full_attention", 1)):
        assert [one.name for one in find_queries(model, {label})] == [f"model.layers.{layer}.self_attn.q_norm"]
    assert len(find_queries(model, {"sliding_attention", "full_attention"})) == 2


@pytest.mark.parametrize(
    ("attn", "settings", "starts"),
    [
        ("sdpa", {}, [0, 32]),
        ("eager", {"multi_query": False}, [0, 96]),
        ("sdpa", {"new_decoder_architecture": True, "num_kv_heads": 1}, [0, 32]),
    ],
)
def test_attention_by_code_of_its_own_is_seen(build, settings, starts, attn):
    model = load_uneven(build("falcon", **{"new_decoder_architecture": False, **settings}), attn_implementation=attn)
    for queries in find_queries(model, {None}):
        assert torch.equal(queries.rows, halves(starts, 16))
    assert model.config._attn_implementation == attn
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_mask_that_is_given_by_its_name(build):
    """As afmoe gives it."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    model = load_uneven(build("afmoe", head_dim=32, **sizes))
    assert [queries.name[-6:] for queries in find_queries(model, {None})] == ["q_norm", "q_norm"]


def test_a_module_that_attends_twice_is_one_layer(build):
    model = load_uneven(build("diffllama", num_key_value_heads=2))
    names = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    assert [queries.name for queries in find_queries(model, {None})] == names


def test_parts_that_name_no_attention_are_left_so(build):
    """As moshi's, of which no model is made here."""
    config = AutoConfig.for_model("moshi", **MOSHI)
    model = AutoModelForCausalLM.from_config(config)
    assert len(find_queries(model, {None})) == 2
    assert (config._attn_implementation, config.depth_decoder_config._attn_implementation) == ("sdpa", None)
    assert "ropecli:layout" not in AttentionInterface._global_mapping


def test_layers_without_positions_are_passed_over(build):
    model = load_uneven(build("smollm3", no_rope_layers=[0, 1]))
    assert [one.name for one in find_queries(model, {None})] == ["model.layers.1.self_attn.q_proj"]


def test_one_projection_of_several_layers_is_refused(llama):
    model = load_uneven(llama)
    model.model.layers[1].self_attn.q_proj = model.model.layers[0].self_attn.q_proj
    with pytest.raises(PatchError, match="share the projection"):
        find_queries(model, {None})


def test_what_changes_the_queries_in_between_is_noticed(llama):
    model = load_uneven(llama)
    for layer in model.model.layers:
        norm = torch.nn.RMSNorm(32, elementwise_affine=False)
        layer.self_attn.q_proj = torch.nn.Sequential(layer.self_attn.q_proj, torch.nn.Unflatten(-1, (-1, 32)), norm)
    with pytest.raises(PatchError, match=r"Layer 0 \(LlamaAttention\): its queries do not come unchanged"):
        find_queries(model, {None})


def test_the_model_is_left_as_it_was(llama):
    model, ids = load_uneven(llama).train(), torch.arange(12)[None]
    names = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        find_queries(model, {None})
        torch.testing.assert_close(model(ids, use_cache=False).logits, logits, rtol=0, atol=0)
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == names
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
