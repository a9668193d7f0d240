"""What the optimizer works on; its 8-bit form is tested where bitsandbytes is (test_bitsandbytes.py)."""

import pytest
import torch

from ropecli.errors import RecipeError
from ropecli.training.optimization import make_optimizer
from ropecli.training.recipe import make_recipe


def recipe_of(**keys):
    return make_recipe(None, {"data": "demo-train", **keys})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2, bias=False))


def test_matrices_alone_decay(model):
    optimizer = make_optimizer(model.named_parameters(), recipe_of(learning_rate=0.5, weight_decay=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, value in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), value * (1 - 0.5 * 0.1) if value.ndim > 1 else value)


def test_a_step_is_adamws(model):
    """One step from rest moves each value by the rate, against its gradient's sign, after the decay."""
    recipe = recipe_of(learning_rate=1e-2, weight_decay=0.1, betas=[0.8, 0.9])
    optimizer = make_optimizer(model.named_parameters(), recipe)
    weight = model[0].weight
    before, gradient = weight.detach().clone(), torch.randn(4, 6)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight.grad = gradient
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before * (1 - 1e-3) - 1e-2 * gradient.sign(), rtol=1e-4, atol=1e-6)
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_eight_bits_without_bitsandbytes_say_what_to_install(model, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install bitsandbytes"):
        make_optimizer(model.named_parameters(), recipe_of(optimizer="adamw-8bit"))
