"""How heads turn, found on live models and held against what is known of each; and what is refused, with its reason."""

import contextlib
import types

import pytest
import torch
from tiny_settings import EXPERTS, LATENT, ONE_OF_EACH, PARTIAL
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama import modeling_llama
from uneven import load_uneven

from ropecli.checkpoint import layout
from ropecli.checkpoint.layout import Layout, find_layout, layer_label
from ropecli.checkpoint.live import rotary_tables
from ropecli.errors import PatchError
from ropecli.remapping.attention.turning import Rotation

HALVES, NEIGHBOURS = Layout(0, False), Layout(0, True)
KNOWN = {
    "llama": ({"head_dim": 32}, HALVES),
    "gemma3_text": ({"head_dim": 32, **ONE_OF_EACH}, HALVES),
    "glm": ({"head_dim": 32}, NEIGHBOURS),
    "gpt_oss": ({"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **EXPERTS}, HALVES),
    "phi3": (PARTIAL, HALVES),
    "deepseek_v2": (LATENT, Layout(32, True)),
    "deepseek_v3": (LATENT, Layout(32, False)),
}
NO_POSITIONS = r"the layers that see the whole context, 1 of \d do not turn by the rotary tables"
REFUSED = {
    "falcon": ({}, "No layer calls an attention function"),
    "hunyuan_v1_dense": ({"head_dim": 32}, r"Layer 0 \(HunYuanDenseV1Attention\) changes queries or keys after the"),
    "llama4_text": ({"head_dim": 32, **EXPERTS, "intermediate_size_mlp": 96}, "does not see the whole context"),
    "mistral": ({"sliding_window": 16}, "Every layer looks back sliding_window tokens"),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_other_precisions_are_proved_too(build, llama, dtype):
    assert find_layout(load_uneven(llama, dtype=dtype)) == HALVES
    with pytest.raises(PatchError, match="after the rotation"):
        find_layout(load_uneven(build("hunyuan_v1_dense", head_dim=32), dtype=dtype))


def test_a_wrong_turning_fits_no_layout(llama, monkeypatch):
    class Slower(Rotation):
        def turn(self, states, by):
            return super().turn(states, 0.99 * by)

    monkeypatch.setattr(layout, "Rotation", Slower)
    with pytest.raises(PatchError, match="Layer 0"):
        find_layout(load_uneven(llama))


def test_one_head_that_does_not_turn_is_noticed(build, monkeypatch):
    rotate = modeling_llama.apply_rotary_pos_emb

    def all_but_the_last(query, key, cos, sin):
        turned, keys = rotate(query, key, cos, sin)
        return torch.cat([turned[:, :-1], query[:, -1:]], 1), keys

    model = load_uneven(build("llama", head_dim=16, num_attention_heads=4))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", all_but_the_last)
    with left_as_it_is(model), pytest.raises(PatchError, match=r"Layer 0 \(LlamaAttention\) changes queries or keys"):
        find_layout(model)


def test_layers_that_do_not_turn_alike_are_refused(llama, monkeypatch):
    rotate, calls = modeling_llama.apply_rotary_pos_emb, []

    def every_other_by_neighbours(query, key, cos, sin):
        calls.append(1)
        if len(calls) % 2:
            return rotate(query, key, cos, sin)
        parted = [torch.cat([states[..., 0::2], states[..., 1::2]], -1) for states in (query, key)]
        turned = (states.chunk(2, -1) for states in rotate(*parted, cos, sin))
        return tuple(torch.stack(pair, -1).flatten(-2) for pair in turned)

    model = load_uneven(llama)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", every_other_by_neighbours)
    with left_as_it_is(model), pytest.raises(PatchError, match="do not turn alike"):
        find_layout(model)


def test_a_layer_that_turns_and_does_not_come_by_is_refused(llama):
    model = load_uneven(llama)
    model.model.layers[1].self_attn.forward = lambda hidden_states, position_embeddings, **others: (
        hidden_states * position_embeddings[0].mean(-1, keepdim=True),
        None,
    )
    with left_as_it_is(model), pytest.raises(PatchError, match="do not come by the attention function"):
        find_layout(model)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"indices": torch.zeros(1)}, r"no other function than its own gives: \['indices'\]"),
        ({"is_causal": False}, "attends in both directions"),
        ({"attention_mask": None}, "no mask"),
        ({"sliding_window": 16}, "names a sliding_window, and sees the whole context"),
        ({"attention_mask": torch.ones(1, 1, 24, 24)}, "changes the mask"),
    ],
)
def test_what_the_function_cannot_honour_is_named(llama, asked, reason):
    model = load_uneven(llama)
    layer = model.model.layers[1].self_attn
    plain = layer.forward
    layer.forward = lambda *arguments, **named: plain(*arguments, **{**named, **asked})
    with pytest.raises(PatchError, match=reason):
        find_layout(model)


def test_a_model_that_breaks_is_left_as_it_is(llama):
    model = load_uneven(llama)
    with left_as_it_is(model):
        model.model.layers[1].mlp.forward = lambda hidden: 1 / 0
        with pytest.raises(PatchError, match="division by zero"):
            find_layout(model)
        del model.model.layers[1].mlp.forward


def test_a_label_is_the_modules_own_or_its_place_in_the_config():
    labels = {"full_attention": 1, "sliding_attention": 2}
    config = types.SimpleNamespace(layer_types=["sliding_attention", "full_attention"])
    module = types.SimpleNamespace(config=config, layer_idx=1)
    assert layer_label(module, {None}) is None
    assert layer_label(module, labels) == "full_attention"
    assert layer_label(types.SimpleNamespace(**vars(module), layer_type="sliding_attention"), labels) == (
        "sliding_attention"
    )
    with pytest.raises(PatchError, match=r"Layer 7 .* does not say by which of the rotary tables"):
        layer_label(types.SimpleNamespace(config=config, layer_idx=7), labels)
