"""The training loop, its optimizer and its learning rate.

A step is one update of the weights, after one or more passes on each process. Its loss is the mean over all its scored
tokens, however they are split over passes and processes. With `loss_weighting: documents` the gradient is that of the
mean over its documents' mean losses (LongAlign, Bai et al. 2024, arXiv:2401.18058, equation 2); the reported loss is
the same. Dropout depends only on the seed and the step number, so a resumed run gives the same bits.
"""

import itertools
import math
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import Batch
from ropecli.errors import RecipeError
from ropecli.training.launch import Launch
from ropecli.training.recipe_schema import Recipe


@dataclass(frozen=True)
class TrainingProgress:
    """Metrics of one step. step: from 1. loss: nats per token.

    tokens: in this step, tokens_per_second: since the run started or resumed, both over all processes.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    tokens: int


def train_steps(
    launch: Launch,
    module: torch.nn.Module,
    optimizer: Any,
    rate: Callable[[int], float],
    batches: Callable[[int], Sequence[Batch]],
    start: int = 0,
    *,
    max_grad_norm: float,
    seed: int,
) -> Generator[TrainingProgress, None, None]:
    """Update the weights step by step, without an end.

    module: a NextTokenLoss, or Accelerate's wrapper around one. rate: the learning rate of a step, from 0. batches:
    this process's batches of a step, one per pass, made ahead in a thread. start: steps that are done.
    Nothing within a step waits for the device: its numbers are read once, at the end, by one reduction, which also
    counts the tokens of the next step's batches.
    """
    started, tokens = time.monotonic(), 0
    parameters = list(module.parameters())
    with ThreadPoolExecutor(1, "batches") as thread:
        current = batches(start)
        counts = launch.total(*_counts(current))
        for step in itertools.count(start):
            coming = thread.submit(batches, step + 1)
            torch.manual_seed(seed + step)
            learning_rate = rate(step)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            targets, weight = (count / launch.sequence_ranks for count in counts)
            # engines average over processes and passes; this scale makes that the mean over all tokens or documents
            scale = launch.world * len(current) / weight
            nll = sum(_pass(launch, module, batch, scale) for batch in current)
            norm = launch.clip(parameters, max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            step_tokens = sum(batch.ids.size for batch in current) * launch.data_ranks
            tokens += step_tokens
            current = coming.result()
            total, *counts = launch.total(nll, *_counts(current))
            speed = tokens / (time.monotonic() - started)
            yield TrainingProgress(step + 1, total / targets, learning_rate, float(norm), speed, step_tokens)


def _pass(launch: Launch, module: torch.nn.Module, batch: Batch, scale: float) -> torch.Tensor:
    """Run forward and backward. Returns the summed, unweighted loss of this process's tokens, nats, float64."""
    share = launch.take(batch)
    with launch.accelerator.accumulate(module):
        nll = module(*share)
        launch.accelerator.backward(nll * scale)
    return nll.detach().double()


def _counts(batches: Sequence[Batch]) -> tuple[int, float]:
    """The number of scored tokens, and their weight."""
    return sum(int((batch.labels != UNSCORED).sum()) for batch in batches), sum(batch.weight for batch in batches)


def make_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Create AdamW (arXiv:1711.05101) for the trained parameters; weight decay applies only to matrices.

    adamw-8bit: bitsandbytes keeps the state in 8 bits (Dettmers et al. 2022, arXiv:2110.02861); tensors with fewer than
    4,096 values stay in float32. Raises RecipeError if bitsandbytes is not installed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rates: dict[str, Any] = {"lr": recipe.learning_rate, "betas": recipe.betas}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, **rates, fused=True)  # fused makes no temporary copies
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise RecipeError("optimizer: adamw-8bit needs bitsandbytes. Run `pip install bitsandbytes`.") from error
    return AdamW8bit(groups, **rates)


def rate_factor(step: int, recipe: Recipe) -> float:
    """Factor of the learning rate at step 0, 1, ...: linear warm-up, then 1, a cosine down to 0.1, or a line to 0."""
    warm = min(1.0, (step + 1) / (recipe.warmup_steps + 1))
    if recipe.schedule == "constant":
        return warm
    if recipe.schedule == "linear":  # zero after the last step
        return min(warm, (recipe.steps - step) / max(1, recipe.steps - recipe.warmup_steps))
    past = max(0.0, step - recipe.warmup_steps) / max(1, recipe.steps - 1 - recipe.warmup_steps)
    return warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, past))))
