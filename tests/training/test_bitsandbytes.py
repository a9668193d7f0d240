"""4-bit bases and 8-bit optimizer state, where bitsandbytes is; test_bitsandbytes_environment.py installs it."""

import pytest
import torch

pytest.importorskip("bitsandbytes")

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.live.loading import load_model
from ropecli.training import adapters
from ropecli.training.finished_weights import write_result
from ropecli.training.loop import make_optimizer
from ropecli.training.loss import NextTokenLoss
from ropecli.training.recipe_schema import make_recipe

IDS = torch.arange(4, 4 + 2 * 40).reshape(2, 40) * 5 % 512


@pytest.fixture(scope="module")
def checkpoint(build):
    return open_checkpoint(build("llama", head_dim=32, hidden_size=128, intermediate_size=192))


def recipe_of(**keys):
    return make_recipe(None, {"data": "demo-train", "mixed_precision": "none", "learning_rate": 1e-2, **keys})


def quantized(checkpoint, recipe):
    from transformers import AutoModelForCausalLM

    arguments = adapters.quantization(recipe, torch.device("cpu"))
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32, **arguments)


def loss(loss_of):
    return loss_of(IDS.to(loss_of.model.device), torch.roll(IDS, -1, 1).to(loss_of.model.device)) / IDS.numel()


def train(model, recipe, steps=12):
    loss_of = NextTokenLoss(adapters.attach(model, recipe))
    model.train()
    optimizer = make_optimizer(model, recipe)
    losses = []
    for _ in range(steps):
        value = loss(loss_of)
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    return loss_of, optimizer, losses


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS.to(model.device)).logits.float().cpu()


def test_gradients_are_those_of_the_dequantized_weights(checkpoint):
    """Also after a pass in evaluation mode, which left to itself repacks the weights on some CPUs."""
    from bitsandbytes.functional import dequantize_4bit

    recipe = recipe_of(adapter="qlora")
    model = quantized(checkpoint, recipe)
    whole = load_model(checkpoint, dtype="float32", device="cpu")
    for name, module in model.named_modules():
        if hasattr(getattr(module, "weight", None), "quant_state"):
            values = dequantize_4bit(module.weight.data, module.weight.quant_state)
            whole.get_submodule(name).weight.data.copy_(values)
    adapters.attach(model, recipe)
    logits(model)
    losses = [NextTokenLoss(model.train()), NextTokenLoss(adapters.attach(whole, recipe).train())]
    for loss_of in losses:
        torch.manual_seed(0)
        for name, parameter in adapters.trainable(loss_of):
            if "lora_B" in name:
                parameter.data.copy_(torch.randn(parameter.shape) * 0.02)
        loss(loss_of).backward()
    for (name, actual), (_, expected) in zip(*map(adapters.trainable, losses), strict=True):
        assert (actual.grad.cpu() - expected.grad).norm() < 1e-3 * expected.grad.norm(), name


def test_adapter_is_merged_into_the_unquantized_weights(checkpoint, tmp_path):
    """The logits are those of the unquantized base with the same adapter."""
    from transformers import AutoModelForCausalLM

    recipe = recipe_of(adapter="qlora")
    model = quantized(checkpoint, recipe)
    train(model, recipe)
    write_result(checkpoint, model, tmp_path, {"recipe": {"steps": 12}})
    plain = adapters.attach(load_model(checkpoint, dtype="float32", device="cpu"), recipe)
    trained = {name: parameter.detach() for name, parameter in adapters.trainable(model)}
    plain.load_state_dict(trained, strict=False)
    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))
    expected = logits(plain)
    assert (merged - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (merged - logits(model)).abs().max() > 1e-3 * expected.abs().max()


def test_optimizer_state_is_in_eight_bits(checkpoint):
    recipe = recipe_of(optimizer="adamw-8bit", learning_rate=1e-3)
    model = load_model(checkpoint, dtype="float32", device="cpu")
    _, optimizer, losses = train(model, recipe)
    states = {tuple(parameter.shape): state for parameter, state in optimizer.state.items()}
    assert states[(512, 128)]["state1"].dtype == torch.uint8
    assert states[(512, 128)]["state2"].dtype == torch.uint8
    assert states[(128,)]["state1"].dtype == torch.float32
    *_, plain = train(load_model(checkpoint, dtype="float32", device="cpu"), recipe_of(learning_rate=1e-3))
    assert losses[-1] == pytest.approx(plain[-1], abs=0.05)
    assert losses[0] - losses[-1] > 0.5
