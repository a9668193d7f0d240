"""Checkpoints that carry a distance method are trained with it, and refused what would do without it.

Their gradients are tested in tests/attention/test_block_attention.py, adapters in test_adapters.py.
"""

import pytest
import torch

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.files import read_record
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.errors import RecipeError
from ropecli.scaling.spec import make_spec
from ropecli.training.recipe_schema import make_recipe
from ropecli.training.stages import plan_stages

LENGTH = 100


@pytest.fixture(scope="module")
def remapped(llama, tmp_path_factory):
    """The tiny Llama patched with ReRoPE for twice its pretraining length."""
    output = tmp_path_factory.mktemp("rerope") / "patched"
    patch_to(make_plan(open_checkpoint(llama), make_spec("rerope", 2.0, {"window": 20})), output)
    return output


def test_result_has_the_method(remapped, tune, corpus):
    from transformers import AutoModelForCausalLM

    measured = {"eval_data": str(corpus), "eval_every": 3, "eval_documents": 3, "eval_lengths": [64, 128]}
    whole_run = tune(remapped, length=LENGTH, **measured)
    assert (whole_run / "config.json").read_bytes() == (remapped / "config.json").read_bytes()
    record = read_record(whole_run)
    assert record.pop("finetuned")
    assert record.pop("trained_after_patch")
    assert record == read_record(remapped)
    model = AutoModelForCausalLM.from_pretrained(whole_run)
    assert model.config._attn_implementation == "ropecli:rerope"
    ids = torch.arange(120)[None]
    with torch.no_grad():
        far = model(ids).logits
        model.set_attn_implementation("sdpa")
        assert (model(ids).logits - far).abs().max() > 1e-2 * far.abs().max()


@pytest.mark.parametrize("keys", [{"positions": "pose", "length": 48}, {"sequences": "packed"}, {"attn": "sdpa"}])
def test_settings_that_break_a_distance_method_are_refused(remapped, llama, tune, tmp_path, keys):
    message = "rerope counts the tokens of a row with its own attention"
    with pytest.raises(RecipeError, match=message):
        tune(remapped, **keys)
    assert list(tmp_path.iterdir()) == []
    stages = [{"steps": 2}, {"patch": {"method": "rerope", "factor": 2}, **keys}]
    with pytest.raises(RecipeError, match=rf"(?s)stage 2 of 2.*{message}"):
        plan_stages(open_checkpoint(llama), make_recipe(None, {"data": "demo-train", "length": 128, "stages": stages}))
