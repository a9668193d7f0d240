"""How heads turn, found on live models and held against what is known of each; and what is refused, with its reason."""

import contextlib

import pytest
import torch
from tiny_settings import EXPERTS, LATENT, ONE_OF_EACH, PARTIAL
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama import modeling_llama
from uneven import load_uneven

from ropecli.attention.head_layout import HeadLayout, find_layout
from ropecli.errors import PatchError
from ropecli.live.rotary import rotary_tables

HALVES, NEIGHBOURS = HeadLayout(0, False), HeadLayout(0, True)
KNOWN = {
    "llama": ({"head_dim": 32}, HALVES),
    "gemma3_text": ({"head_dim": 32, **ONE_OF_EACH}, HALVES),
    "glm": ({"head_dim": 32}, NEIGHBOURS),
    "gpt_oss": ({"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **EXPERTS}, HALVES),
    "phi3": (PARTIAL, HALVES),
    "deepseek_v2": (LATENT, HeadLayout(32, True)),
    "deepseek_v3": (LATENT, HeadLayout(32, False)),
}
NO_POSITIONS = r"1 of \d layers with full attention do not rotate by the rotary tables"
REFUSED = {
    "falcon": ({}, "No layer uses transformers' attention interface"),
    "hunyuan_v1_dense": ({"head_dim": 32}, r"Layer 0 \(HunYuanDenseV1Attention\) changes queries or keys after the"),
    "llama4_text": ({"head_dim": 32, **EXPERTS, "intermediate_size_mlp": 96}, "hides part of the context"),
    "mistral": ({"sliding_window": 16}, "All layers have a sliding window"),
    "smollm3": ({"no_rope_layers": [1, 0]}, NO_POSITIONS),
}


@contextlib.contextmanager
def left_as_it_is(model):
    """Whatever comes of it: the attention, the tables, the weights' mode and what transformers knows are as before."""
    tables = {table.name: (table.module, dict(table.module.__dict__)) for table in rotary_tables(model)}
    buffers = {name: dict(module.named_buffers()) for name, (module, _) in tables.items()}
    names = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    attention, ids = model.config._attn_implementation, torch.arange(12)[None]
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        next(model.children()).train()
        training = [module.training for module in model.modules()]
        yield
        assert [module.training for module in model.modules()] == training
        model.eval()
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, logits, rtol=0, atol=0)
    assert model.config._attn_implementation == attention
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == names
    for name, (module, attributes) in tables.items():
        assert set(module.__dict__) == set(attributes)
        assert not module._forward_pre_hooks
        assert all(buffer is dict(module.named_buffers())[key] for key, buffer in buffers[name].items())


@pytest.mark.parametrize("model_type", KNOWN)
def test_the_layout_is_the_known_one(build, model_type):
    settings, known = KNOWN[model_type]
    model = load_uneven(build(model_type, **settings))
    with left_as_it_is(model):
        assert find_layout(model) == known


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_not_exact_is_refused_with_its_reason(build, model_type):
    settings, reason = REFUSED[model_type]
    model = load_uneven(build(model_type, **settings))
    with left_as_it_is(model), pytest.raises(PatchError, match=reason):
        find_layout(model)


def test_one_head_that_does_not_rotate_is_noticed(build, monkeypatch):
    rotate = modeling_llama.apply_rotary_pos_emb

    def all_but_the_last(query, key, cos, sin):
        turned, keys = rotate(query, key, cos, sin)
        return torch.cat([turned[:, :-1], query[:, -1:]], 1), keys

    model = load_uneven(build("llama", head_dim=16, num_attention_heads=4))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", all_but_the_last)
    with left_as_it_is(model), pytest.raises(PatchError, match=r"Layer 0 \(LlamaAttention\) changes queries or keys"):
        find_layout(model)
