"""The optimizer, and the learning rate of each step.

AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101; bitsandbytes keeps its state in 8 bits.
"""

import importlib.util
import logging
import math
from collections.abc import Iterable
from typing import Any

import torch

from ropecli.errors import RecipeError
from ropecli.training.recipe import Recipe

_STEPS = 8
_FEWEST = 4
_LATEST = 3


def make_optimizer(
    parameters_by_name: Iterable[tuple[str, torch.nn.Parameter]], recipe: Recipe
) -> torch.optim.Optimizer:
    """Over what is trained, and nothing else. Weight decay on matrices alone, an adapter's among them.

    adamw-8bit: two bytes of state per parameter in place of eight, in blocks with a scale each (Dettmers et al. 2022,
    arXiv:2110.02861), on GPUs and CPUs alike; tensors below 4,096 values stay in float32. Raises RecipeError where
    bitsandbytes is missing.
    """
    parameters = [parameter for _, parameter in parameters_by_name if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    decays = ((matrices, recipe.weight_decay), (vectors, 0.0))
    groups = [{"params": members, "weight_decay": decay} for members, decay in decays if members]
    rates: dict[str, Any] = {"lr": recipe.learning_rate, "betas": recipe.betas}
    if recipe.optimizer == "adamw-8bit":
        return load_bitsandbytes("optimizer: adamw-8bit").optim.AdamW8bit(groups, **rates)
    return torch.optim.AdamW(groups, **rates, fused=True)  # which needs no copies of what it updates


def load_bitsandbytes(asked: str) -> Any:
    """The library. asked: the key of the recipe that needs it. Raises RecipeError where it is missing."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(f"{asked} needs bitsandbytes, which is not installed. `pip install bitsandbytes`.")
    # on a CPU it would name a package of faster code that it does without
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes


def rate_factor(step: int, recipe: Recipe) -> float:
    """What the learning rate is multiplied by at step 0, 1, ...: a linear warm-up, then 1, or a cosine to a tenth."""
    warm = min(1.0, (step + 1) / (recipe.warmup_steps + 1))
    if recipe.schedule == "constant":
        return warm
    past = max(0.0, step - recipe.warmup_steps) / max(1, recipe.steps - 1 - recipe.warmup_steps)
    return warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, past))))
