"""The learning rate of each step."""

import math

from ropecli.training.recipe import Recipe


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """The rate of step 0, 1, ...: linear warm-up, then constant, or a cosine to a tenth at the last step."""
    warm = min(1.0, (step + 1) / (recipe.warmup_steps + 1))
    if recipe.schedule == "constant":
        return recipe.learning_rate * warm
    past = max(0.0, step - recipe.warmup_steps) / max(1, recipe.steps - 1 - recipe.warmup_steps)
    return recipe.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, past))))
