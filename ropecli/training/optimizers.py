"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), also with its state in 8 bits."""

from collections.abc import Iterable
from typing import Any

import torch

from ropecli.training.bits import load_bitsandbytes
from ropecli.training.recipe import Recipe


def make_optimizer(
    parameters_by_name: Iterable[tuple[str, torch.nn.Parameter]], recipe: Recipe
) -> torch.optim.Optimizer:
    """Over what is trained, and nothing else. Weight decay on matrices alone, an adapter's among them.

    adamw-8bit: two bytes of state per parameter in place of eight, in blocks with a scale each (Dettmers et al. 2022,
    arXiv:2110.02861), on GPUs and CPUs alike; tensors below 4,096 values stay in float32. Raises RecipeError where
    bitsandbytes is missing or does not load.
    """
    parameters = [parameter for _, parameter in parameters_by_name if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    decays = ((matrices, recipe.weight_decay), (vectors, 0.0))
    groups = [{"params": members, "weight_decay": decay} for members, decay in decays if members]
    rates: dict[str, Any] = {"lr": recipe.learning_rate, "betas": recipe.betas}
    if recipe.optimizer == "adamw-8bit":
        return load_bitsandbytes("optimizer: adamw-8bit", "optimizer: adamw").optim.AdamW8bit(groups, **rates)
    return torch.optim.AdamW(groups, **rates, fused=True)  # which needs no copies of what it updates
