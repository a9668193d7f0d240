"""Trains a few parameters on calibration sequences, the weights frozen; keeps those with the best score.

The loop is that of `ropecli finetune`. What a step reads and drops follows from the seed and its number, so a resumed
run gives the same bits.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import Batch
from ropecli.training.distributed import make_accelerator
from ropecli.training.loop import TrainingLoop, TrainingProgress
from ropecli.training.loss import NextTokenLoss, disable_checkpointing, enable_checkpointing
from ropecli.training.run_folder import Checkpoints
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.tune_report import Score
from ropecli.tuning.tune_settings import TuneSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Groups = Sequence[tuple[Sequence[nn.Parameter], float]]
"""Parameters that are trained together, with their learning rate at the start; it falls by a cosine to zero."""
_MAX_GRAD_NORM = 1.0


class Learned(NamedTuple):
    """What was scored after `step` updates; step 0 is the start. seconds: with the updates since the last score."""

    step: int
    score: Score
    seconds: float = 0.0


class _Progress(nn.Module):
    """What a training checkpoint holds: the parameters, the best values of them so far, and all scores so far."""

    scores: Tensor

    def __init__(self, parameters: Sequence[nn.Parameter], settings: TuneSettings) -> None:
        super().__init__()
        self.steps = [*range(settings.evaluate_every, settings.steps, settings.evaluate_every), settings.steps]
        self.trained = nn.ParameterList(parameters)
        copies = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
        self.best = nn.ParameterList(nn.Parameter(copy, requires_grad=False) for copy in copies)
        self.register_buffer("scores", torch.full((len(self.steps), 5), torch.nan, dtype=torch.float64))

    @property
    def learned(self) -> list[Learned]:
        rows = zip(self.steps, self.scores.tolist(), strict=True)
        return [
            Learned(step, Score(target, window, objective, int(documents)), seconds)
            for step, (target, window, objective, documents, seconds) in rows
            if not math.isnan(target)
        ]

    def add(self, learned: Learned) -> None:
        row = [*astuple(learned.score), learned.seconds]
        self.scores[self.steps.index(learned.step)] = torch.tensor(row, dtype=torch.float64)

    def keep_best(self) -> None:
        _copy(self.trained, self.best)

    def restore_best(self) -> None:
        _copy(self.best, self.trained)


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)


@dataclass
class _Learning:
    """What the training loop asks: which sequences a step reads, whether the training has ended, and how it scores."""

    model: "PreTrainedModel"
    sequences: Tensor
    evaluator: Evaluator
    settings: TuneSettings
    start: Score
    on_score: Callable[[Learned], None]
    progress: _Progress

    def __post_init__(self) -> None:
        self._since = time.perf_counter()

    @property
    def best(self) -> Learned:
        return min((Learned(0, self.start), *self.progress.learned), key=lambda learned: learned.score.objective)

    def rate_factor(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * step / self.settings.steps))

    def batches(self, step: int) -> list[Batch]:
        drawn = torch.Generator().manual_seed(self.settings.seed + step)
        order = torch.randperm(len(self.sequences), generator=drawn)
        ids = self.sequences[order[: self.settings.batch_size]].numpy()
        labels = np.concatenate([ids[:, 1:], np.full_like(ids[:, :1], UNSCORED)], axis=1)
        return [Batch(ids, labels)]

    def ended(self, step: int) -> bool:
        every = self.settings.evaluate_every
        without_improvement = step // every - self.best.step // every
        return step >= self.settings.steps or without_improvement >= self.settings.patience

    def score_if_due(self, trained: TrainingProgress) -> None:
        if trained.step not in self.progress.steps:
            return
        self.model.eval()
        score = self.evaluator.score(self.model, f"{self.settings.level} {trained.step}")
        self.model.train()
        learned = Learned(trained.step, score, time.perf_counter() - self._since)
        self.on_score(learned)
        if score.objective < self.best.score.objective:
            self.progress.keep_best()
        self.progress.add(learned)
        self._since = time.perf_counter()


def learn(
    model: "PreTrainedModel",
    groups: Groups,
    sequences: Tensor,
    evaluator: Evaluator,
    settings: TuneSettings,
    *,
    start: Score,
    snapshots: Path | None = None,
    on_score: Callable[[Learned], None] = lambda learned: None,
) -> Learned:
    """Updates `groups` and leaves them at their best, whatever ends the training; the rest of the model is frozen.

    sequences: token ids, shape (sequences, tokens). start: the score before any update. snapshots: the folder where the
    progress is saved at every score, and resumed from. on_score: told of every score, those of an interrupted run too.
    Raises NotFiniteError, and OutputError where no snapshot is sound or the disk refuses.
    """
    parameters = [parameter for group, _ in groups for parameter in group]
    accelerator, progress = _make_accelerator(model), _Progress(parameters, settings)
    optimizer = torch.optim.Adam([{"params": list(group), "lr": rate} for group, rate in groups])
    _, optimizer = accelerator.prepare(progress, optimizer, device_placement=[False, False])
    learning = _Learning(model, sequences, evaluator, settings, start, on_score, progress)
    checkpoints = Checkpoints(accelerator, snapshots, settings.evaluate_every, keep=2) if snapshots else None
    loop = TrainingLoop(
        accelerator,
        NextTokenLoss(model),
        parameters,
        optimizer,
        schedule=learning.rate_factor,
        batches=learning.batches,
        ended=learning.ended,
        max_grad_norm=_MAX_GRAD_NORM,
        seed=settings.seed,
        on_step=learning.score_if_due,
        checkpoints=checkpoints,
        advice=lambda: "Load the model in float32, if it is not.",
    )
    try:
        with _training(model, parameters):
            done = checkpoints.restore() if checkpoints else 0
            for learned in progress.learned:
                on_score(learned)
            loop.train(done)
    finally:
        progress.restore_best()
    return learning.best


def _make_accelerator(model: "PreTrainedModel") -> Any:
    accelerator = make_accelerator()
    accelerator.state.device = model.device  # --device may name another than Accelerate's first
    return accelerator


@contextlib.contextmanager
def _training(model: "PreTrainedModel", parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Only `parameters` get a gradient, and layers are computed again in the backward pass."""
    model.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    if model.supports_gradient_checkpointing:
        enable_checkpointing(model)
    model.train()
    try:
        yield
    finally:
        model.eval()
        if model.supports_gradient_checkpointing:
            disable_checkpointing(model)
        model.requires_grad_(False)
