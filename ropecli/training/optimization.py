"""The optimizer, the learning rate of each step, and whether the loss diverges.

AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101; bitsandbytes keeps its state in 8 bits.
"""

import importlib.util
import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ropecli.errors import DivergedError, RecipeError, reason_of
from ropecli.resume import list_snapshots
from ropecli.training.recipe import Recipe
from ropecli.training.run_folder import CHECKPOINTS

_STEPS = 8
_FEWEST = 4
_LATEST = 3


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


def load_bitsandbytes(asked: str, instead: str) -> Any:
    """The library. asked, instead: keys of the recipe, as 'adapter: qlora'.

    Raises RecipeError where it is missing, or does not load.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            f"{asked} needs bitsandbytes, which is not installed. "
            f"Install it (pip install bitsandbytes), or take {instead}."
        )
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would name, on a CPU, a package of faster code that it does without
    try:
        import bitsandbytes
    except Exception as error:  # a library that was built for another device fails in its own ways
        raise RecipeError(
            f"{asked} needs bitsandbytes, and the one here does not load: {reason_of(error)}. "
            f"Install one that fits, or take {instead}."
        ) from error
    finally:
        logger.setLevel(level)
    return bitsandbytes


def rate_factor(step: int, recipe: Recipe) -> float:
    """What the learning rate is multiplied by at step 0, 1, ...: a linear warm-up, then 1, or a cosine to a tenth."""
    warm = min(1.0, (step + 1) / (recipe.warmup_steps + 1))
    if recipe.schedule == "constant":
        return warm
    past = max(0.0, step - recipe.warmup_steps) / max(1, recipe.steps - 1 - recipe.warmup_steps)
    return warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, past))))


class Divergence:
    """Tells whether a run diverges: its loss is far above its best so far.

    What is held against the best is the median of the last 8 steps' losses, nats per token: up to three spikes among
    them change nothing. The best is the least such median so far, of 4 steps or more: a few easy sequences at the
    beginning are no measure. All follows from the losses alone, so a resumed run acts as an uninterrupted one.

    max_rise: nats per token. output: the run's folder, whose checkpoints the error names.
    """

    def __init__(self, max_rise: float, output: Path) -> None:
        self._max_rise = max_rise
        self._output = output
        self._last: deque[float] = deque(maxlen=_STEPS)
        self._best = math.inf
        self._good: dict[int, bool] = {}

    @classmethod
    def from_losses(cls, losses: Mapping[int, float], max_rise: float, output: Path) -> "Divergence":
        """As it stands after the steps of `losses`."""
        divergence = cls(max_rise, output)
        for step in sorted(losses):
            divergence._enter(step, losses[step])
        return divergence

    def add(self, step: int, loss: float) -> None:
        """Takes in a step's loss, which is finite. Raises DivergedError."""
        self._enter(step, loss)
        now = median(self._last)
        if len(self._last) == _STEPS and now > self._best + self._max_rise:
            raise DivergedError(
                f"The loss is {now:.3f} nats per token around step {step}, and was {self._best:.3f} at its best: more "
                f"than max_loss_rise, {self._max_rise:g}, above. {self.kept()} Start over with a lower learning_rate "
                "or more warmup_steps, into another --output; or, if it may rise so far, --resume with a higher "
                "max_loss_rise."
            )

    def last_good(self, steps: Iterable[int]) -> int | None:
        """Of the steps that checkpoints are of, the last one at which the loss stood well."""
        return max((step for step in steps if self._good.get(step, True)), default=None)

    def _enter(self, step: int, loss: float) -> None:
        self._last.append(loss)
        if len(self._last) >= _FEWEST:
            self._best = min(self._best, median(self._last))
        # the latest steps alone: most of eight would still be from before
        latest = median(list(self._last)[-_LATEST:])
        self._good[step] = latest <= self._best + self._max_rise / 2

    def kept(self) -> str:
        """A sentence that names the checkpoint which a run that goes wrong leaves."""
        folders = dict(list_snapshots(self._output / CHECKPOINTS))
        step = self.last_good(folders)
        return "No checkpoint was saved before." if step is None else f"{folders[step]} is of before, and is kept."
