"""Learns a few numbers on calibration sequences, the weights frozen; keeps those with the best score.

Deterministic: what a step reads and drops follows from the seed and its number, so that a resumed run goes the same
way.
"""

import contextlib
import hashlib
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ropecli.atomic import new_file
from ropecli.attention.attention_probe import in_evaluation
from ropecli.data.sequences import UNSCORED
from ropecli.errors import NotFiniteError, OutputError, RecipeError
from ropecli.live.rotary import rotary_tables
from ropecli.training.loss import NextTokenLoss, disable_checkpointing, enable_checkpointing, is_checkpointing
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.tune_report import Score
from ropecli.tuning.tuning_settings import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_DIGEST_BYTES = 32
"""Of sha256, at the end of a saved state."""


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
    state_file: Path | None,
    on_score: Callable[[int, Score, float], None],
) -> Learned:
    """Updates `groups`, which are left at their best, whatever ends the training; all else of the model stays.

    sequences: token ids, shape (sequences, tokens). start: the score before any update. state_file: saves the progress
    at every score, and resumes from it; an interrupt loses no more than the steps since the last. on_score: told the
    step, the score and the seconds since the last. Raises NotFiniteError; RecipeError for the state of another request,
    OutputError for a damaged one and for what the disk refuses.
    """
    parameters = [parameter for group in groups for parameter in group]
    optimizer = torch.optim.Adam(
        [{"params": list(group), "lr": rate} for group, rate in zip(groups, schedule.rates, strict=True)]
    )
    request = _request(model, parameters, sequences, evaluator, schedule, name)
    best, best_values, first = Learned(start, 0), _copies(parameters), 0
    if state_file is not None and state_file.exists():
        first, best, best_values = _restore(state_file, request, parameters, optimizer)
    try:
        with _trained_alone(model, parameters):
            loss_of = NextTokenLoss(model)
            since = time.perf_counter()
            for step in range(first, schedule.steps):
                if _evaluations_without_improvement(best, step, schedule) >= schedule.patience:
                    break
                model.train()
                _update(loss_of, optimizer, parameters, sequences, schedule, step)
                model.eval()
                if (step + 1) % schedule.evaluate_every == 0 or step + 1 == schedule.steps:
                    score = evaluator.score(model, f"{name} {step + 1}")
                    on_score(step + 1, score, time.perf_counter() - since)
                    if score.objective < best.score.objective:
                        best, best_values = Learned(score, step + 1), _copies(parameters)
                    if state_file is not None:
                        _save(state_file, request, step + 1, best, best_values, parameters, optimizer)
                    since = time.perf_counter()
    finally:
        _set(parameters, best_values)
    return best


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


def _request(
    model: "PreTrainedModel",
    parameters: Sequence[nn.Parameter],
    sequences: Tensor,
    evaluator: Evaluator,
    schedule: Schedule,
    name: str,
) -> str:
    """sha256 of what must be the same for a run that resumes from a saved state."""
    tables = [(table.name, table.inv_freq.tolist(), table.attention_factor) for table in rotary_tables(model)]
    shapes = [tuple(parameter.shape) for parameter in parameters]
    evaluation = (
        evaluator.documents.fingerprint(),
        evaluator.original_length,
        evaluator.target_length,
        evaluator.short_weight,
        evaluator.targets,
    )
    sha = hashlib.sha256(repr((name, schedule, shapes, evaluation, tables)).encode())
    sha.update(sequences.numpy().tobytes())
    return sha.hexdigest()


def _save(
    path: Path,
    request: str,
    step: int,
    best: Learned,
    best_values: list[Tensor],
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
) -> None:
    values: dict[str, Any] = {
        "request": request,
        "step": step,
        "best_step": best.step,
        "best_score": asdict(best.score),
        "kept": best_values,
        "parameters": _copies(parameters),
        "optimizer": optimizer.state_dict(),
    }
    written = io.BytesIO()  # torch would raise what it likes where a disk is full
    torch.save(values, written)
    digest = hashlib.sha256(written.getvalue()).digest()  # torch.load checks nothing
    with new_file(path) as partial:
        partial.write_bytes(written.getvalue() + digest)


def _restore(
    path: Path, request: str, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[int, Learned, list[Tensor]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OutputError(f"{path} cannot be read: {error.strerror or error}.") from error
    written, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(written).digest() != digest:
        raise OutputError(
            f"Cannot resume from {path}: it is damaged, or an older version of ropecli wrote it. Delete it to train "
            "from the start."
        )
    values = torch.load(io.BytesIO(written), map_location="cpu", weights_only=True)
    if values["request"] != request:
        raise RecipeError(f"{path} is of another request; go on with the same, or remove it to begin anew.")
    _set(parameters, values["parameters"])
    optimizer.load_state_dict(values["optimizer"])
    return values["step"], Learned(Score(**values["best_score"]), values["best_step"]), values["kept"]
