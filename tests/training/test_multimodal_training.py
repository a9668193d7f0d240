"""Fine-tuning a multimodal model trains its language part, and writes every tensor back under its name."""

import pytest
import torch
from safetensors import safe_open

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.live.loading import load_model
from ropecli.training.adapters import attach, trainable
from ropecli.training.loss import NextTokenLoss
from ropecli.training.recipe_schema import make_recipe


def tensors(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize(
    ("model_type", "keys"), [("qwen2_vl", {}), ("llava", {"adapter": "lora"}), ("llama4", {})], ids=str
)
def test_every_tensor_is_written_and_only_text_is_trained(model_type, keys, build, tune):
    source = build(model_type)
    before, after = tensors(source), tensors(tune(source, steps=2, **keys))
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not [name for name in changed if "vis" in name or "multi_modal" in name]


@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl"])
def test_every_trained_parameter_gets_a_gradient(model_type, build, corpus):
    """DDP stops at one that never does."""
    recipe = make_recipe(None, {"data": str(corpus)})
    model = attach(load_model(open_checkpoint(build(model_type), weights=True)), recipe)
    ids = torch.arange(24)[None]
    NextTokenLoss(model)(ids, ids).backward()
    trained = trainable(model)
    assert trained
    assert [name for name, parameter in trained if parameter.grad is None] == []
