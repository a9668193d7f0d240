"""What the optimizer updates, and the learning rate of each step.

The 8-bit optimizer is tested where bitsandbytes is (test_bitsandbytes.py).
"""

import math
import sys

import numpy as np
import pytest
import torch

from ropecli.errors import RecipeError
from ropecli.training.loop import make_optimizer, rate_factor
from ropecli.training.recipe_schema import Recipe, make_recipe


def recipe_of(**keys):
    return make_recipe(None, {"data": "demo-train", **keys})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2, bias=False))


def test_step_is_that_of_adamw(model):
    """One step from rest moves each value by the rate, against its gradient's sign, after the decay."""
    recipe = recipe_of(learning_rate=1e-2, weight_decay=0.1, betas=[0.8, 0.9])
    optimizer = make_optimizer(model, recipe)
    weight = model[0].weight
    before, gradient = weight.detach().clone(), torch.randn(4, 6)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight.grad = gradient
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before * (1 - 1e-3) - 1e-2 * gradient.sign(), rtol=1e-4, atol=1e-6)
    assert all(group["betas"] == (0.8, 0.9) for group in optimizer.param_groups)


def test_missing_bitsandbytes_is_refused(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(RecipeError, match="pip install bitsandbytes"):
        make_optimizer(model, recipe_of(optimizer="adamw-8bit"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"steps": 5, "warmup_steps": 3}, [0.25, 0.5, 0.75, 1, 1]),
        (
            {"steps": 7, "warmup_steps": 2, "schedule": "cosine"},
            [1 / 3, 2 / 3, 1, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1 + 0.45 * (1 - math.sqrt(0.5)), 0.1],
        ),
        ({"steps": 1, "warmup_steps": 0, "schedule": "cosine"}, [1]),
        ({"steps": 6, "warmup_steps": 2, "schedule": "linear"}, [1 / 3, 2 / 3, 1, 0.75, 0.5, 0.25]),
    ],
    ids=["constant", "cosine after a warm-up", "a single step", "linear after a warm-up"],
)
def test_learning_rate_follows_its_schedule(keys, expected):
    recipe = Recipe(data="x", **keys)
    np.testing.assert_allclose([rate_factor(step, recipe) for step in range(recipe.steps)], expected, rtol=1e-12)
