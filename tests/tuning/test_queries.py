"""The rows that give the queries, held against each architecture's own layout, written down by hand."""

import pytest
import torch
from tiny_settings import LATENT, PARTIAL
from transformers import AttentionInterface, AttentionMaskInterface
from uneven import load_uneven

from ropecli.errors import PatchError
from ropecli.tuning.queries import find_queries

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
    # of each head 12 rows that stand still, then 8 that turn, which transformers takes apart by neighbours
    "deepseek_v3": (SMALL_LATENT, "self_attn.q_b_proj", neighbours([12, 32], 4)),
    "qwen3": ({"head_dim": 32}, "self_attn.q_norm", halves([0], 16)),
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


def test_of_layer_types_only_those_that_are_asked_for(build):
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "head_dim": 32}
    model = load_uneven(build("gemma3_text", **kinds))
    for label, layer in (("sliding_attention", 0), ("full_attention", 1)):
        assert [one.name for one in find_queries(model, {label})] == [f"model.layers.{layer}.self_attn.q_norm"]
    assert len(find_queries(model, {"sliding_attention", "full_attention"})) == 2


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
