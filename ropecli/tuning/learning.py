"""Learns a few numbers on calibration sequences, the weights frozen; keeps those with the best score.

Deterministic: what a step reads and drops follows from the seed and its number, so that a resumed run goes the same
way.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ropecli.attention.attention_probe import in_evaluation
from ropecli.data.sequences import UNSCORED
from ropecli.errors import NotFiniteError, OutputError, reason_of
from ropecli.resume import (
    begin_snapshot,
    complete_snapshot,
    list_snapshots,
    manifest_fault,
    prune_snapshots,
    restore_newest,
)
from ropecli.training.loss import NextTokenLoss, disable_checkpointing, enable_checkpointing, is_checkpointing
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.tune_report import Score
from ropecli.tuning.tuning_settings import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_STATE = "state.pt"


@dataclass(frozen=True)
class Learned:
    """The best that was found. step: after how many updates; 0 where nothing was better than the start. numbers: how
    many were learned.
    """

    score: Score
    step: int
    numbers: int = 0


def learn(
    model: "PreTrainedModel",
    groups: Sequence[Sequence[nn.Parameter]],
    sequences: Tensor,
    evaluator: Evaluator,
    schedule: Schedule,
    *,
    name: str,
    start: Score,
    snapshots: Path | None,
    on_score: Callable[[int, Score, float], None],
) -> Learned:
    """Updates `groups`, which are left at their best, whatever ends the training; all else of the model stays.

    sequences: token ids, shape (sequences, tokens). start: the score before any update. snapshots: the folder where the
    progress is saved at every score, and resumed from. on_score: told the step, the score and the seconds since the
    last. Raises NotFiniteError, and OutputError where no snapshot is sound or the disk refuses.
    """
    parameters = [parameter for group in groups for parameter in group]
    optimizer = torch.optim.Adam(
        [{"params": list(group), "lr": rate} for group, rate in zip(groups, schedule.rates, strict=True)]
    )
    state = _State(Learned(start, 0), _copies(parameters))
    first = state.restore(snapshots, parameters, optimizer) if snapshots else 0
    try:
        with _trained_alone(model, parameters):
            loss_of = NextTokenLoss(model)
            since = time.perf_counter()
            for step in range(first, schedule.steps):
                if _evaluations_without_improvement(state.best, step, schedule) >= schedule.patience:
                    break
                model.train()
                _update(loss_of, optimizer, parameters, sequences, schedule, step)
                model.eval()
                if (step + 1) % schedule.evaluate_every == 0 or step + 1 == schedule.steps:
                    score = evaluator.score(model, f"{name} {step + 1}")
                    on_score(step + 1, score, time.perf_counter() - since)
                    if score.objective < state.best.score.objective:
                        state.best, state.best_values = Learned(score, step + 1), _copies(parameters)
                    if snapshots:
                        state.save(snapshots, step + 1, parameters, optimizer)
                    since = time.perf_counter()
    finally:
        _set(parameters, state.best_values)
    return state.best


@contextlib.contextmanager
def _trained_alone(model: "PreTrainedModel", parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Only `parameters` get a gradient, and layers are computed again in the backward pass; at the end as before."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    switches = model.supports_gradient_checkpointing and not is_checkpointing(model)
    try:
        with in_evaluation(model):
            model.requires_grad_(False)
            for parameter in parameters:
                parameter.requires_grad_(True)
            if switches:
                enable_checkpointing(model)
            yield
    finally:
        if switches:
            disable_checkpointing(model)
        for parameter, required in before:
            parameter.requires_grad_(required)
        for parameter in parameters:
            parameter.grad = None


def _evaluations_without_improvement(best: Learned, step: int, schedule: Schedule) -> int:
    return step // schedule.evaluate_every - best.step // schedule.evaluate_every


def _update(
    loss_of: NextTokenLoss,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    sequences: Tensor,
    schedule: Schedule,
    step: int,
) -> None:
    for group, rate in zip(optimizer.param_groups, schedule.rates, strict=True):
        group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / schedule.steps))
    drawn = torch.Generator().manual_seed(schedule.seed + step)
    count = min(schedule.batch_size, len(sequences))
    device = parameters[0].device
    ids = sequences[torch.randperm(len(sequences), generator=drawn)[:count]].to(device)
    labels = torch.full_like(ids, UNSCORED)
    labels[:, :-1] = ids[:, 1:]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(schedule.seed + step)
        loss = loss_of(ids, labels) / (labels != UNSCORED).sum()
        loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, schedule.max_grad_norm)
    if not (loss.isfinite() and norm.isfinite()):
        raise NotFiniteError(
            f"The loss is {loss.item():g} and the gradient {float(norm):g} at step {step + 1}; both must be finite. "
            "Load the model in float32, if it is not."
        )
    optimizer.step()
    optimizer.zero_grad()


def _copies(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in parameters]


@torch.no_grad()
def _set(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@dataclass
class _State:
    """The best so far, saved and restored together with the parameters and their optimizer."""

    best: Learned
    best_values: list[Tensor]

    def save(
        self, snapshots: Path, step: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        values = {
            "best_step": self.best.step,
            "best_score": asdict(self.best.score),
            "best_values": self.best_values,
            "parameters": _copies(parameters),
            "optimizer": optimizer.state_dict(),
        }
        try:
            partial = begin_snapshot(snapshots, step)
            torch.save(values, partial / _STATE)
            complete_snapshot(partial)
        except (OSError, RuntimeError) as error:  # torch raises either where a disk is full
            raise OutputError(f"{snapshots} could not be written: {reason_of(error)}") from error
        prune_snapshots(snapshots, step, keep=2)

    def restore(self, snapshots: Path, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
        """The step after which it was saved; 0 where it was not."""

        def load(snapshot: Path) -> str | None:
            if fault := manifest_fault(snapshot):
                return fault
            values = torch.load(snapshot / _STATE, map_location="cpu", weights_only=True)
            _set(parameters, values["parameters"])
            optimizer.load_state_dict(values["optimizer"])
            self.best = Learned(Score(**values["best_score"]), values["best_step"])
            self.best_values = values["best_values"]
            return None

        return restore_newest(list_snapshots(snapshots), load)
