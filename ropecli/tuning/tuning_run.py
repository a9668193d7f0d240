"""What all levels of tuning share: a run's parts, how a plan is tried, and the proof of what was learned.

The proof compares logits of a few tokens: the folded weights must give those of the model that was tuned.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ropecli.attention.patching import live_patch, unpatched_after
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.errors import NotFiniteError, ProofError
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.folding import find_stored
from ropecli.tuning.learning import Learned, learn
from ropecli.tuning.tune_report import LayerGains, Point, Score
from ropecli.tuning.tuning_settings import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PROBE_TOKENS = 64
"""Tokens whose logits the written checkpoint must give."""
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of a logit, relative to the largest: what a dtype's rounding leaves between two ways to compute the same."""


@dataclass(frozen=True)
class TuningRun:
    """What a level works on.

    sequences: token ids to learn from, shape (sequences, target). snapshots: where a level that
    learns saves its progress; None: not saved. on_point: told of every measurement.
    """

    checkpoint: Checkpoint
    model: "PreTrainedModel"
    factor: float
    evaluator: Evaluator
    sequences: Tensor
    settings: Settings
    snapshots: Path | None = None
    on_point: Callable[[Point], None] = lambda point: None


class Logits(NamedTuple):
    """values: float32, on the CPU, shape (1, tokens, vocabulary). dtype: what they were computed in."""

    values: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class Tuned:
    """plan: the patch. score: of the tuned model; start: of the plan alone. probe, logits: tokens, shape
    (1, tokens), and what the written checkpoint must make of them. changed: weights to be written beside the patch, by
    their names in the files and in their dtype there; empty where constants alone were found.
    learned: how many numbers. step: after how many updates. rounding: by how much a logit moves when the weights are
    rounded to the files' dtype. gains, log_temperature: what the level heads learned.
    """

    plan: PatchPlan
    start: Score
    score: Score
    probe: Tensor
    logits: Logits
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    learned: int = 0
    step: int = 0
    rounding: float = 0.0
    gains: tuple[LayerGains, ...] = ()
    log_temperature: float = 0.0


def try_plan(run: TuningRun, plan: PatchPlan, part: str, count: int, **others: Any) -> float:
    """The objective of a plan on the evaluator's first `count` documents; infinite where a loss is not finite.

    others: of the Point that on_point is told. The model is left as it was.
    """
    started = time.perf_counter()
    with unpatched_after(run.model):
        live_patch(run.model, plan.ropes)
        try:
            score = run.evaluator.score(run.model, part, count)
        except NotFiniteError:
            score = Score(math.inf, math.inf, math.inf, count)
    run.on_point(Point.of(plan, score, time.perf_counter() - started, **others))
    return score.objective


def train(
    run: TuningRun,
    plan: PatchPlan,
    start: Score,
    groups: Sequence[Sequence[torch.nn.Parameter]],
    rates: tuple[float, ...],
) -> tuple[Learned, Logits]:
    """Learns the groups of parameters at these rates; and the logits that the model then gives for the probe, in
    float32 where it can.
    """
    level, learned = run.settings.level, sum(one.numel() for group in groups for one in group)

    def on_score(step: int, score: Score, seconds: float) -> None:
        run.on_point(Point.of(plan, score, seconds, level, step=step, learned=learned))

    best = learn(
        run.model,
        groups,
        run.sequences,
        run.evaluator,
        replace(run.settings.schedule, rates=rates),
        name=level,
        start=start,
        snapshots=run.snapshots,
        on_score=on_score,
    )
    probe = probe_of(run)
    with in_float32(run.model, probe):
        return replace(best, numbers=learned), logits_of(run.model, probe)


def finish(run: TuningRun, plan: PatchPlan, start: Score) -> Tuned:
    """What is found by constants alone."""
    probe = probe_of(run)
    return Tuned(plan, start, start, probe, logits_of(run.model, probe))


def finish_learned(
    run: TuningRun,
    plan: PatchPlan,
    start: Score,
    best: Learned,
    live: Logits,
    folded: Mapping[str, Tensor],
    **others: Any,
) -> Tuned:
    """Puts the folded weights into the model, and proves that it is the one that was tuned.

    live: its logits of the probe before, of `train`. folded: parameters by their names in the model. others: of Tuned,
    where anything was learned. Raises ProofError, PatchError for a weight that the files do not hold.
    """
    probe, rounding = probe_of(run), 0.0
    changed: dict[str, Tensor] = {}
    if best.step:  # without an update nothing is to be written
        stored = find_stored(run.checkpoint, run.model, folded)
        changed = {one.name: folded[name].to(one.dtype) for name, one in stored.items()}
        rounded = {name: changed[one.name] for name, one in stored.items()}
        with in_float32(run.model, probe):
            set_parameters(run.model, folded)
            exact = logits_of(run.model, probe)
            refuse_other(exact, live, "The folded weights give")
            set_parameters(run.model, rounded)
            rounding = difference(logits_of(run.model, probe), exact)
        set_parameters(run.model, rounded)
    return Tuned(
        plan,
        start,
        best.score,
        probe,
        logits_of(run.model, probe),
        changed=changed,
        learned=best.numbers if best.step else 0,
        step=best.step,
        rounding=rounding,
        **(others if best.step else {}),
    )


def probe_of(run: TuningRun) -> Tensor:
    """Tokens of the first document that the evaluator reads."""
    return torch.from_numpy(run.evaluator.documents.kept[0].ids[:_PROBE_TOKENS])[None]


@torch.no_grad()
def set_parameters(model: "PreTrainedModel", values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        model.get_parameter(name).copy_(value)


@torch.inference_mode()
def logits_of(model: "PreTrainedModel", probe: Tensor) -> Logits:
    values = model(input_ids=probe.to(model.device), use_cache=False).logits.float().cpu()
    return Logits(values, model.dtype)


@contextlib.contextmanager
def in_float32(model: "PreTrainedModel", probe: Tensor) -> Iterator[None]:
    """A model in half precision computes in float32, if there is room and it can; at the end its weights are as before.

    Rounding would hide in half precision whether weights are folded right, and make right ones look wrong.
    """
    before = [(one, one.data) for one in model.parameters() if one.dtype in (torch.float16, torch.bfloat16)]

    def put_back() -> None:
        for parameter, values in before:
            parameter.data = values

    try:
        try:
            for parameter, values in before:
                parameter.data = values.float()
            if before:
                logits_of(model, probe)
        except RuntimeError:  # out of memory, or a kernel that wants half precision
            put_back()
        yield
    finally:
        put_back()


def difference(one: Logits, other: Logits) -> float:
    """The largest of a logit, relative to the largest of all."""
    return float((one.values - other.values).abs().max() / other.values.abs().max().clamp_min(1e-6))


def refuse_other(found: Logits, tuned: Logits, what: str) -> None:
    """what: how the message begins. Raises ProofError, for NaN too."""
    off = difference(found, tuned)
    allowed, dtype = max((_ROUNDING[one.dtype], str(one.dtype)) for one in (found, tuned))
    if not off <= allowed:
        raise ProofError(
            f"{what} other logits than the tuned model (off by {off:.2g} of the largest, where {allowed:g} is "
            f"{dtype.removeprefix('torch.')}'s rounding): nothing is written."
        )
