"""A relative-position method is put on a live model and taken away again, and proved before it is written."""

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from ropecli.attention.patching import live_patch, patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import PatchError
from ropecli.live.rotary import unpatched_after
from ropecli.scaling.spec import make_spec

IDS = (torch.arange(1, 141)[None] * 37) % 512


def plan(folder, method="rerope", **params):
    return make_plan(open_checkpoint(folder), make_spec(method, 4.0, params))


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


def test_a_loaded_checkpoint_has_its_own_back_after_another(llama, patched):
    model = load(patched(llama, "rerope"))
    before = logits(model)
    with unpatched_after(model):
        live_patch(model, plan(llama, "yarn").ropes)
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
        patch_to(plan(llama), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    model = load(llama)
    with pytest.raises(PatchError, match="too short for rerope to change any distance"):
        live_patch(model, plan(llama).ropes)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("names", "warned"),
    [({"AutoModelForCausalLM": "own.Own"}, True), ({"AutoConfig": "own.Own"}, False), (["AutoModel"], False)],
)
def test_code_of_the_checkpoints_own_is_warned_of(names, warned, llama, edited):
    """It may run an attention of its own under the method's name."""
    source = edited(llama, auto_map=names)
    assert any("custom code (auto_map)" in warning for warning in plan(source).writing_warnings) is warned
    assert not any("auto_map" in warning for warning in plan(source, "yarn").writing_warnings)
