"""Runs a whole tuning: from a checkpoint and a source of text to the tuned model, its report and its folder.

Constants are searched first; a level that learns starts from the best of them.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropecli.attention.patching import live_patch, unpatched_after
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.errors import NotFiniteError, PatchError
from ropecli.evaluation.eval_report import environment
from ropecli.evaluation.saved_progress import EvalProgress
from ropecli.evaluation.scoring import refuse_unknown_ids
from ropecli.scaling.spec import ScalingSpec, label_of, make_spec
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.folding import (
    Folded,
    Logits,
    StoredWeight,
    find_stored,
    fold,
    in_float32,
    logits_of,
    write_folded,
)
from ropecli.tuning.gains import HeadGains
from ropecli.tuning.learning import Learned, learn
from ropecli.tuning.low_rank import LowRankUpdates
from ropecli.tuning.search import evolve, search_constants
from ropecli.tuning.task import TuningTask
from ropecli.tuning.tune_report import TRAINING, Point, Score, TuneReport, files_of, notes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 64
"""Tokens whose logits the written checkpoint must give."""
Learner = HeadGains | LowRankUpdates


@dataclass(frozen=True)
class Tuned:
    """plan: the patch. folded: the weights that go with it. probe: token ids, shape (1, tokens), whose logits the
    written checkpoint must give. report: what was tried and found.
    """

    plan: PatchPlan
    folded: Folded
    probe: Tensor
    report: TuneReport


def run_task(
    task: TuningTask,
    model: "PreTrainedModel",
    *,
    folder: Path | None = None,
    command: Sequence[str] = (),
    on_point: Callable[[Point], None] = lambda point: None,
) -> Tuned:
    """Measures the model as pretrained and by the baseline patch, and tunes it; it is left as it was tuned.

    folder: where the progress is saved, and resumed from (resume.open_state). command: for the report. on_point: told
    of every measurement, those of an interrupted run too. Raises PatchError for a model whose weights cannot hold what
    would be learned, ProofError, NotFiniteError.
    """
    run = TuningRun(task, model, folder, on_point)
    learner, stored = _make_learner(task, model)
    base = run.score_patched(task.plan(make_spec("none")), "base")
    plain = run.score_patched(task.baseline, "plain")
    plan = task.plan(run.search())
    live_patch(model, plan.ropes)
    begun = run.evaluator.score(model, f"{task.settings.level} 0")
    best, folded = Learned(0, begun), Folded(logits_of(model, run.probe))
    found: dict[str, Any] = {"learned": 0}
    if learner:
        best, live, numbers = run.train(learner, plan, begun)
        if best.step:
            folded = fold(model, learner.folded(), stored, live, run.probe)
            found = {"learned": numbers, **learner.record()}
    scores = {"base": base, "plain": plain, "begun": begun, "score": best.score}
    report = run.report(plan, command=list(command), step=best.step, rounding=folded.rounding, **scores, **found)
    return Tuned(plan, folded, run.probe, report)


class TuningRun:
    """A model, and what is measured of it."""

    def __init__(
        self, task: TuningTask, model: "PreTrainedModel", folder: Path | None, on_point: Callable[[Point], None]
    ) -> None:
        self.task, self.model, self._folder, self._on_point = task, model, folder, on_point
        self.points: list[Point] = []
        documents = task.calibration.evaluated
        self.probe = torch.from_numpy(documents.kept[0].ids[:_PROBE_TOKENS])[None]
        self.evaluator = Evaluator(
            documents,
            task.original_length,
            task.target_length,
            task.settings.short_weight,
            task.targets,
            EvalProgress(folder),
        )
        refuse_unknown_ids(int(task.calibration.sequences.max()), model)  # the evaluator checks its own documents

    def score_patched(self, plan: PatchPlan, part: str) -> Score:
        """Of the model with this patch; the model is left as it was."""
        with unpatched_after(self.model):
            live_patch(self.model, plan.ropes)
            return self.evaluator.score(self.model, part)

    def search(self) -> ScalingSpec:
        """The best constants, or with --level search the best factors."""
        task = self.task
        search = evolve if task.settings.level == "search" else search_constants
        return search(task.geometry, task.factor, task.settings, len(task.calibration.evaluated.kept), self._measure)

    def _measure(self, spec: ScalingSpec, documents: int, iteration: int = 0) -> float:
        """The objective of a scaling; infinite where a loss is not finite."""
        level = "search" if self.task.settings.level == "search" else "grid"
        plan, started = self.task.plan(spec), time.perf_counter()
        with unpatched_after(self.model):
            live_patch(self.model, plan.ropes)
            try:
                score, seconds = self.evaluator.timed_score(self.model, f"{level} {spec}", documents)
            except NotFiniteError:
                score, seconds = Score(math.inf, math.inf, math.inf, documents), time.perf_counter() - started
        self._add(Point.of(plan, score, seconds, level, step=iteration))
        return score.objective

    def train(self, learner: Learner, plan: PatchPlan, begun: Score) -> tuple[Learned, Logits, int]:
        """The best that was learned, the logits of the probe with it, and how many numbers are trained."""
        settings = self.task.settings
        with learner.live():
            numbers = sum(parameter.numel() for group, _ in learner.groups for parameter in group)

            def on_score(learned: Learned) -> None:
                step, score, seconds = learned
                self._add(Point.of(plan, score, seconds, settings.level, step=step, learned=numbers))

            best = learn(
                self.model,
                learner.groups,
                self.task.calibration.sequences,
                self.evaluator,
                settings,
                start=begun,
                snapshots=self._folder / "learned" if self._folder else None,
                on_score=on_score,
            )
            with in_float32(self.model, self.probe):
                return best, logits_of(self.model, self.probe), numbers

    def _add(self, point: Point) -> None:
        self.points.append(point)
        self._on_point(point)

    def report(self, plan: PatchPlan, **found: Any) -> TuneReport:
        """found: the scores and what was learned. Seconds are of all points, in whichever run they were measured."""
        task, rope = self.task, plan.ropes[plan.scaled[0]]
        return TuneReport(
            checkpoint=task.checkpoint.name,
            digest=task.checkpoint.digest(),
            level=task.settings.level,
            factor=plan.spec.factor,
            original_max_position_embeddings=task.original_length,
            target_length=task.target_length,
            source=task.source,
            fingerprint=task.calibration.fingerprint(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self.model.device),
            settings=task.settings_values(),
            method=plan.spec.method.name,
            params=dict(plan.spec.params),
            attention_factor=float(rope.attention_factor),
            inv_freq=rope.inv_freq.tolist(),
            pretrained_inv_freq=rope.geometry.inv_freq().tolist(),
            plain_name=_baseline_name(task.baseline.spec),
            seconds=sum(point.seconds for point in self.points),
            points=self.points,
            environment=environment(),
            **found,
        )


def _make_learner(task: TuningTask, model: "PreTrainedModel") -> tuple[Learner | None, dict[str, StoredWeight]]:
    """What the level learns, and where the files hold the weights that will hold it; nothing for grid and search.

    Raises PatchError, before anything is searched, where what is learned could not be written into the weights.
    """
    level, settings = task.settings.level, task.settings
    if level not in TRAINING:
        return None, {}
    try:
        learner: Learner
        if level == "heads":
            learner = HeadGains(model, task.baseline.scaled)
        else:
            learner = LowRankUpdates(model, settings.rank, settings.seed)
        return learner, find_stored(task.checkpoint, model, learner.weights)
    except PatchError as error:
        raise PatchError(
            f"{task.checkpoint.name} does not support --level {level}. {error} --level grid leaves the weights as they "
            "are."
        ) from error


def _baseline_name(spec: ScalingSpec) -> str:
    chosen = label_of(spec.method.name, spec.factor, spec.params)
    return f"{chosen}, nothing tuned" if chosen == label_of(spec.method.name, spec.factor, {}) else f"{chosen}, a point"


def write_tuned(
    tuned: Tuned, output: Path, *, link: bool = True, say: Callable[[str], None] = lambda message: None
) -> int:
    """Writes the tuned checkpoint with its report, and proves it; returns how many live rotary tables did.

    link, say: as write_patch's. Raises OutputError, ProofError; then nothing is left behind.
    """
    return write_folded(
        tuned.plan,
        tuned.folded,
        tuned.probe,
        output,
        files=files_of(tuned.report),
        notes={"tuned": {**notes_of(tuned.report), "weights_changed": bool(tuned.folded.changed)}},
        link=link,
        say=say,
    )
