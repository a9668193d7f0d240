"""What the optimizer updates, the learning rate of each step, and which losses end a run.

The 8-bit optimizer is tested where bitsandbytes is (test_bitsandbytes.py).
"""

import math
import sys

import numpy as np
import pytest
import torch

from ropecli.errors import DivergedError, RecipeError
from ropecli.training.finetuning import make_optimizer, rate_factor
from ropecli.training.loop import Divergence
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
    optimizer = make_optimizer(model.named_parameters(), recipe)
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
        make_optimizer(model.named_parameters(), recipe_of(optimizer="adamw-8bit"))


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


def ends_at(losses, max_rise, output, known=0):
    """The step at which a run of these losses is ended, or None. known: number of losses from before it was resumed."""
    divergence = Divergence(max_rise, output, dict(enumerate(losses[:known], 1)))
    for step, loss in enumerate(losses[known:], known + 1):
        try:
            divergence.add(step, loss)
        except DivergedError:
            return step
    return None


def rough(steps, seed=0):
    """Losses as of small batches: falling from 4 to 3 nats, a quarter of a nat apart."""
    return 3 + np.exp(-np.arange(steps) / 20) + np.random.default_rng(seed).normal(0, 0.25, steps)


def test_noise_and_spikes_do_not_end_a_run(tmp_path):
    for seed in range(20):
        assert ends_at(rough(500, seed), 1.0, tmp_path) is None
    losses = rough(100)
    losses[50:53] = 1e6
    assert ends_at(losses, 1.0, tmp_path) is None


def test_resumed_run_ends_at_the_same_step(tmp_path):
    losses = rough(100)
    losses[50:] += 5
    assert ends_at(losses, 2.0, tmp_path) < 60
    for known in (1, 5, 30, 49, 53):
        assert ends_at(losses, 2.0, tmp_path, known) == ends_at(losses, 2.0, tmp_path)


def test_checkpoint_from_the_rise_is_not_good(tmp_path):
    divergence = Divergence(2.0, tmp_path)
    assert divergence.last_good([4]) == 4
    for step, loss in enumerate([3.0] * 10 + [4.5, 4.5] + [3.0] * 3 + [9.0] + [3.0] * 3, 1):
        divergence.add(step, loss)
    # two of the latest three are up in steps 12 and 13; a single spike changes nothing
    assert [step for step in range(1, 20) if divergence.last_good([step]) is None] == [12, 13]
    assert divergence.last_good([4, 8, 12]) == 8
    assert divergence.last_good([12, 13]) is None
