"""Train a few parameters on calibration sequences, with the weights frozen, and keep the values with the best score.

Uses the training loop of `ropecli finetune`. The sequences and dropout of a step depend only on the seed and the step,
so a resumed run gives bit-identical results.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import Batch
from ropecli.messages import Step, progress_bar
from ropecli.training.launch import start_launch
from ropecli.training.loop import TrainingLoop, TrainingProgress
from ropecli.training.loss import NextTokenLoss, disable_checkpointing, enable_checkpointing
from ropecli.training.run_folder import TrainingCheckpoints
from ropecli.tuning.calibration import PointScorer
from ropecli.tuning.task import Score, TuneSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Groups = Sequence[tuple[Sequence[nn.Parameter], float]]
"""Parameter groups with their initial learning rates, which decay to zero by a cosine schedule."""
EVALUATE_EVERY = 10
"""Steps between scores."""
PATIENCE = 4
"""Scores without improvement before training stops."""


class Learned(NamedTuple):
    """The score after `step` updates; step 0 is the start. seconds: time since the last score, updates included."""

    step: int
    score: Score
    seconds: float = 0.0


class _Learning(nn.Module):
    """The state in a training checkpoint, and the callbacks of the training loop.

    trained: the parameters. best: their values with the best score so far. scores: one row per step (target,
    pretraining, objective, documents, seconds); NaN for steps without a score. measure: the score after a step.
    """

    scores: Tensor
    show: Step

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        sequences: Tensor,
        settings: TuneSettings,
        start: Score,
        measure: Callable[[int], Score],
        on_score: Callable[[Learned], None],
    ) -> None:
        super().__init__()
        self.trained = nn.ParameterList(parameters)
        copies = [parameter.detach().to("cpu", copy=True) for parameter in parameters]
        self.best = nn.ParameterList(nn.Parameter(copy, requires_grad=False) for copy in copies)
        self.register_buffer("scores", torch.full((settings["steps"] + 1, 5), torch.nan, dtype=torch.float64))
        self._sequences, self._settings, self._start = sequences, settings, start
        self._measure, self._on_score = measure, on_score
        self._since = time.perf_counter()

    @property
    def learned(self) -> list[Learned]:
        """All scores so far."""
        return [
            Learned(step, Score(target, pretraining, objective, int(documents)), seconds)
            for step, (target, pretraining, objective, documents, seconds) in enumerate(self.scores.tolist())
            if not math.isnan(target)
        ]

    @property
    def best_learned(self) -> Learned:
        return min((Learned(0, self._start), *self.learned), key=lambda learned: learned.score.objective)

    def rate_factor(self, step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * step / self._settings["steps"]))

    def batches(self, step: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(self._settings["seed"] + step)
        order = torch.randperm(len(self._sequences), generator=generator)
        ids = self._sequences[order[: self._settings["batch_size"]]].numpy()
        labels = np.concatenate([ids[:, 1:], np.full_like(ids[:, :1], UNSCORED)], axis=1)
        return [Batch(ids, labels)]

    def ended(self, step: int) -> bool:
        without_improvement = step // EVALUATE_EVERY - self.best_learned.step // EVALUATE_EVERY
        return step >= self._settings["steps"] or without_improvement >= PATIENCE

    def score_if_due(self, progress: TrainingProgress) -> None:
        step = progress.step
        self.show(done=step, text=f"loss {progress.loss:.3f}")
        if step % EVALUATE_EVERY and step != self._settings["steps"]:
            return
        score = self._measure(step)
        learned = Learned(step, score, time.perf_counter() - self._since)
        self._on_score(learned)
        if score.objective < self.best_learned.score.objective:
            _copy(self.trained, self.best)
        self.scores[step] = torch.tensor([*astuple(score), learned.seconds], dtype=torch.float64)
        self._since = time.perf_counter()


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for values, parameter in zip(source, target, strict=True):
        parameter.copy_(values)


def learn(
    model: "PreTrainedModel",
    groups: Groups,
    sequences: Tensor,
    scorer: PointScorer,
    settings: TuneSettings,
    *,
    start: Score,
    snapshots: Path | None = None,
    on_score: Callable[[Learned], None] = lambda learned: None,
) -> Learned:
    """Train `groups` and set them to their best values, also after an error. The rest of the model is frozen.

    sequences: token ids, shape (sequences, tokens). start: the score before any update. snapshots: folder to save the
    progress in at every score, and to resume from. on_score: called for every score, including those of an interrupted
    run. Raises NotFiniteError, and OutputError if all snapshots are damaged or cannot be written.
    """
    parameters = [parameter for group, _ in groups for parameter in group]

    def measure(step: int) -> Score:
        model.eval()
        score, _ = scorer.score(model, f"heads {step}")
        model.train()
        return score

    launch = start_launch()
    launch.accelerator.state.device = model.device  # --device may differ from Accelerate's default
    learning = _Learning(parameters, sequences, settings, start, measure, on_score)
    optimizer = torch.optim.Adam([{"params": list(group), "lr": rate} for group, rate in groups])
    _, optimizer = launch.accelerator.prepare(learning, optimizer, device_placement=[False, False])
    checkpoints = TrainingCheckpoints(launch, snapshots, EVALUATE_EVERY, keep=2) if snapshots else None
    loop = TrainingLoop(
        launch,
        NextTokenLoss(model),
        parameters,
        optimizer,
        schedule=lambda step: [rate * learning.rate_factor(step) for _, rate in groups],
        batches=learning.batches,
        ended=learning.ended,
        max_grad_norm=1.0,
        seed=settings["seed"],
        on_step=learning.score_if_due,
        checkpoints=checkpoints,
        advice=lambda: "Try --dtype float32.",
    )
    try:
        with _training(model, parameters), progress_bar("heads", settings["steps"]) as learning.show:
            done = checkpoints.restore() if checkpoints else 0
            for learned in learning.learned:
                on_score(learned)
            loop.train(done)
    finally:
        _copy(learning.best, learning.trained)
    return learning.best_learned


@contextlib.contextmanager
def _training(model: "PreTrainedModel", parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Compute gradients only for `parameters`, with gradient checkpointing to save memory."""
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
