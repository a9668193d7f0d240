"""The layout of heads, found on live models, is the known one of each."""

import contextlib

import pytest
import torch
from tiny_settings import LATENT, ONE_OF_EACH
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama import modeling_llama
from uneven import load_uneven

from ropecli.attention.head_layout import HeadLayout, find_layout
from ropecli.errors import PatchError


@contextlib.contextmanager
def restored(model):
    """Checks that the attention, hooks, modes and registered functions are as before."""

    def state() -> list:
        modules = [
            (module.training, len(module._forward_pre_hooks), set(module.__dict__)) for module in model.modules()
        ]
        known = [set(interface._global_mapping) for interface in (AttentionInterface, AttentionMaskInterface)]
        return [model.config._attn_implementation, modules, known]

    next(model.children()).train()
    before = state()
    yield
    assert state() == before


@pytest.mark.parametrize(
    ("model_type", "settings", "known"),
    [
        ("gemma3_text", {"head_dim": 32, **ONE_OF_EACH}, HeadLayout(0, False)),
        ("deepseek_v2", LATENT, HeadLayout(32, True)),
    ],
)
def test_the_layout_is_the_known_one(build, model_type, settings, known):
    """test_small_model.py has all types."""
    model = load_uneven(build(model_type, **settings))
    with restored(model):
        assert find_layout(model) == known


def test_a_single_head_that_does_not_rotate_is_noticed(build, monkeypatch):
    rotate = modeling_llama.apply_rotary_pos_emb

    def all_but_the_last(query, key, cos, sin):
        turned, keys = rotate(query, key, cos, sin)
        return torch.cat([turned[:, :-1], query[:, -1:]], 1), keys

    model = load_uneven(build("llama", head_dim=16, num_attention_heads=4))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", all_but_the_last)
    with restored(model), pytest.raises(PatchError, match=r"Layer 0 \(LlamaAttention\) changes queries or keys"):
        find_layout(model)
