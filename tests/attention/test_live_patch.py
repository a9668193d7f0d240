"""A model patched in memory turns as the plan says, at every length, whatever came before; and can be given back.

Stock transformers remembers the longest length that it has seen under `dynamic`: there, a short pass after a long one
differs from a fresh one. Here it may not.
"""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from ropecli.attention.patching import live_patch, patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.errors import PatchError
from ropecli.live.rotary import rotary_tables, unpatched_after
from ropecli.scaling.spec import ScaledRope, make_spec, scale

WINDOW, TARGET = 64, 256
IDS = torch.from_numpy(np.random.default_rng(11).integers(1, 512, TARGET))[None]
LAYERS = ["sliding_attention", "full_attention"]
SWITCHING = {
    "dynamic": {},
    "dynamic-yarn": {},
    "longrope": {"long_factor": np.linspace(1, 6, 16).tolist(), "short_factor": np.linspace(1, 1.3, 16).tolist()},
}


def load(folder, **options) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **options}).eval()


@torch.no_grad()
def logits(model, length: int = TARGET, **options) -> torch.Tensor:
    return model(IDS[:, :length], **{"use_cache": False, **options}).logits


def plan_of(folder, method: str, **params) -> PatchPlan:
    return make_plan(open_checkpoint(folder), make_spec(method, 4.0, params), in_memory=True)


def fixed(ropes: dict[str | None, ScaledRope], length: int) -> dict[str | None, ScaledRope]:
    """What the ropes are at one length, as ropes that no longer follow any."""
    at_length = {label: scale(rope.geometry, rope.spec, length) for label, rope in ropes.items()}
    return {label: dataclasses.replace(rope, spec=make_spec("none")) for label, rope in at_length.items()}


@pytest.fixture(scope="module")
def gemma3(build):
    return build("gemma3_text", head_dim=32, layer_types=LAYERS, sliding_window=32)


@pytest.fixture(params=["llama", "gemma3"])
def folder(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("method", SWITCHING)
def test_every_pass_follows_its_own_length_whatever_came_before(method, folder):
    ropes, model = plan_of(folder, method, **SWITCHING[method]).positions.ropes, load(folder)
    live_patch(model, ropes)
    for length in (200, 10, WINDOW, WINDOW + 1, TARGET, 10, 200):
        expected = load(folder)
        live_patch(expected, fixed(ropes, length))
        assert torch.equal(logits(model, length), logits(expected, length)), length
    live_patch(expected, fixed(ropes, TARGET))
    assert (logits(model, 40) - logits(expected, 40)).abs().max() > 1e-3, "the frequencies do switch"


@pytest.mark.parametrize("method", ["yarn", "dynamic"])
def test_unpatched_after_restores_the_model_to_the_bit_also_after_an_error(method, folder):
    model = load(folder)
    tables = rotary_tables(model)
    before = [logits(model, length) for length in (30, 200)]
    states = [(dict(table.module.__dict__), table.inv_freq, table.attention_factor) for table in tables]
    with contextlib.suppress(KeyError), unpatched_after(model):
        live_patch(model, plan_of(folder, method, **SWITCHING.get(method, {})).positions.ropes)
        assert not torch.equal(logits(model, 200), before[1])
        raise KeyError
    for length, expected in zip((30, 200), before, strict=True):
        assert torch.equal(logits(model, length), expected)
    for table, (state, inv_freq, attention_factor) in zip(tables, states, strict=True):
        assert table.module.__dict__.keys() == state.keys()
        np.testing.assert_array_equal(table.inv_freq, inv_freq)
        assert table.attention_factor == attention_factor
        assert not table.module._forward_pre_hooks
        assert table.rope_type == "default"


def test_a_model_that_computes_its_frequencies_in_each_pass_is_refused(build):
    source = build("phimoe", num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(PatchError, match=r"rotary_emb computes its frequencies again .* Write the patch to a folder"):
        live_patch(load(source), plan_of(source, "yarn").positions.ropes)


def test_a_softmax_scale_set_at_building_is_refused(build):
    """It was taken from the config when the model was built: scaled in memory, the old temperature would stay."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    parameters = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    folder = build("minicpm3", rope_parameters=parameters, q_lora_rank=16, kv_lora_rank=16)
    with pytest.raises(PatchError, match="mscale_all_dim sets this model's softmax scale"):
        live_patch(load(folder), plan_of(folder, "linear").positions.ropes)


def test_a_loaded_distance_method_is_restored_after_another_patch(llama, patched):
    model = load(patched(llama, "rerope"))
    before = logits(model)
    with unpatched_after(model):
        live_patch(model, plan_of(llama, "yarn").positions.ropes)
        assert model.config._attn_implementation == "sdpa"
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


def test_an_attention_with_an_unknown_feature_is_refused(llama, monkeypatch, tmp_path):
    """The proof compares with the model's own attention, so scaled scores are detected."""

    def another(*arguments, **options):
        return attend(*arguments, **{**options, "scaling": 0.5 * options["scaling"]})

    attend = AttentionInterface._global_mapping["ropecli:rerope"]
    monkeypatch.setitem(AttentionInterface._global_mapping, "ropecli:rerope", another)
    with pytest.raises(
        PatchError, match=r"too short for rerope to change any distance, the output changes by 0\.\d+ of its"
    ):
        patch_to(plan_of(llama, "rerope"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    model = load(llama)
    with pytest.raises(PatchError, match="too short for rerope to change any distance"):
        live_patch(model, plan_of(llama, "rerope").positions.ropes)
    assert model.config._attn_implementation == "sdpa"
