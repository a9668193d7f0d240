"""Run a tuning task: search, train, report and write the tuned checkpoint.

Constants are searched first; training levels start from the best of them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropecli.attention import load_model
from ropecli.attention.patching import live_patch, patch_to
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.writing import write_json
from ropecli.errors import NotFiniteError, PatchError
from ropecli.evaluation.measure import Store
from ropecli.evaluation.readers.live import refuse_unknown_ids
from ropecli.evaluation.report import environment
from ropecli.live.devices import device_names
from ropecli.live.rotary import unpatched_after
from ropecli.scaling.spec import ScalingSpec, label_of, make_spec
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.folding import (
    Folded,
    StoredWeight,
    exact_logits,
    find_stored,
    fold,
    logits_of,
    require_same,
    rewrite_shard,
    short_name,
)
from ropecli.tuning.learners import HeadGains, LowRankUpdates
from ropecli.tuning.learning import Learned, learn
from ropecli.tuning.search import evolve, search_constants
from ropecli.tuning.task import TuningTask
from ropecli.tuning.tune_report import TRAINING, Point, Score, TuneReport, files_of, notes_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 64
"""Tokens of the probe, for comparing the logits of the tuned model and the written checkpoint."""
Learner = HeadGains | LowRankUpdates


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning run. probe: token ids to compare logits on, shape (1, tokens)."""

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
    """Score the model as pretrained and with the baseline patch, then tune it. The model stays tuned.

    folder: where to save the progress and resume from (resume.open_state). command: for the report. on_point: called
    for every measurement, including those of an interrupted run. Raises PatchError if the weights cannot hold the
    learned parameters, ProofError, NotFiniteError.
    """
    run = _Run(task, model, folder, on_point)
    learner, stored = _make_learner(task, model)
    base, _ = run.score_patched(task.plan(make_spec("none")), "base")
    plain, _ = run.score_patched(task.baseline, "plain")
    plan = task.plan(run.search())
    live_patch(model, plan.ropes)
    begun, _ = run.evaluator.score(model, f"{task.settings.level} 0")
    best, folded = Learned(0, begun), Folded(logits_of(model, run.probe))
    found: dict[str, Any] = {"learned": 0}
    if learner:
        best, folded, found = run.train(learner, stored, plan, begun)
    found |= {"base": base, "plain": plain, "begun": begun, "score": best.score, "step": best.step}
    report = _report(task, model, plan, run.points, rounding=folded.rounding, command=list(command), **found)
    return Tuned(plan, folded, run.probe, report)


class _Run:
    """The model being tuned, and the measurements so far."""

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
            Store(folder),
            task.calibration.short,
        )
        refuse_unknown_ids(int(task.calibration.sequences.max()), model)  # the evaluator checks the others

    def score_patched(self, plan: PatchPlan, part: str, documents: int | None = None) -> tuple[Score, float]:
        """Score the model with this patch. Returns the score and its seconds; the model is restored."""
        with unpatched_after(self.model):
            live_patch(self.model, plan.ropes)
            return self.evaluator.score(self.model, part, documents)

    def search(self) -> ScalingSpec:
        """Find the best constants, or for --level search the best factors."""
        task = self.task
        search = evolve if task.settings.level == "search" else search_constants
        return search(task.geometry, task.factor, task.settings, len(task.calibration.evaluated.kept), self._measure)

    def _measure(self, spec: ScalingSpec, documents: int, iteration: int = 0) -> float:
        """Measure the objective of a scaling; infinite if a loss is not finite."""
        level = "search" if self.task.settings.level == "search" else "grid"
        plan, started = self.task.plan(spec), time.perf_counter()
        try:
            score, seconds = self.score_patched(plan, f"{level} {spec}", documents)
        except NotFiniteError:
            score, seconds = Score(math.inf, math.inf, math.inf, documents), time.perf_counter() - started
        self._add(Point.of(plan, score, seconds, level, step=iteration))
        return score.objective

    def train(
        self, learner: Learner, stored: dict[str, StoredWeight], plan: PatchPlan, begun: Score
    ) -> tuple[Learned, Folded, dict[str, Any]]:
        """Train, and fold the result into the model if it is better. Also returns fields of the report."""
        settings = self.task.settings
        with learner.live():
            count = sum(parameter.numel() for group, _ in learner.groups for parameter in group)

            def on_score(learned: Learned) -> None:
                step, score, seconds = learned
                self._add(Point.of(plan, score, seconds, settings.level, step=step, learned=count))

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
            live, weights = exact_logits(self.model, self.probe), learner.folded()
        if not best.step:
            return best, Folded(logits_of(self.model, self.probe)), {"learned": 0}
        folded = fold(self.model, weights, stored, live, self.probe)
        return best, folded, {"learned": count, **learner.record()}

    def _add(self, point: Point) -> None:
        self.points.append(point)
        self._on_point(point)


def _report(
    task: TuningTask, model: "PreTrainedModel", plan: PatchPlan, points: list[Point], **found: Any
) -> TuneReport:
    """found: the scores and learned parameters."""
    rope, baseline = plan.ropes[plan.scaled[0]], task.baseline.spec
    label = label_of(baseline.method.name, baseline.factor, baseline.params)
    return TuneReport(
        checkpoint=task.checkpoint.name,
        digest=task.checkpoint.digest(),
        level=task.settings.level,
        factor=plan.spec.factor,
        original_max_position_embeddings=task.original_length,
        target_length=task.target_length,
        source=task.source,
        fingerprint=task.calibration.fingerprint(),
        dtype=short_name(model.dtype),
        device=device_names(model),
        settings=task.settings_values(),
        method=plan.spec.method.name,
        params=dict(plan.spec.params),
        attention_factor=float(rope.attention_factor),
        inv_freq=rope.inv_freq.tolist(),
        pretrained_inv_freq=rope.geometry.inv_freq().tolist(),
        plain_name=f"{label}, {'first grid point' if baseline.params else 'nothing tuned'}",
        seconds=sum(point.seconds for point in points),
        points=points,
        environment=environment(),
        **found,
    )


def _make_learner(task: TuningTask, model: "PreTrainedModel") -> tuple[Learner | None, dict[str, StoredWeight]]:
    """Make the learner of the level, and find its weights in the files. None for grid and search.

    Raises PatchError, before the search, if the weights cannot hold the learned parameters.
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
            f"{task.checkpoint.name} does not support --level {level}. {error} Use --level grid, which does not change "
            "weights."
        ) from error


def write_tuned(
    tuned: Tuned,
    output: Path,
    *,
    link: bool = True,
    loading: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> int:
    """Write the tuned checkpoint with its report, and prove it. Returns the number of rotary tables compared.

    Before the folder is renamed to `output`, stock transformers loads it and its logits of the probe are compared with
    the tuned model's. link, say: see write_patch. loading: the arguments of load_model that the model was loaded with,
    if the CPU cannot hold or run it. Raises OutputError, ProofError; then the output is removed.
    """
    folded = tuned.folded

    def complete(folder: Path) -> None:
        for name, value in files_of(tuned.report).items():
            write_json(folder / name, value)
        written = open_checkpoint(folder, weights=True)
        model = load_model(written, **(loading or {"dtype": short_name(folded.logits.dtype), "device": "cpu"}))
        found = logits_of(model, tuned.probe)
        require_same(found, folded.logits, "the written checkpoint in stock transformers")

    return patch_to(
        tuned.plan,
        output,
        rewrite=partial(rewrite_shard, folded.changed) if folded.changed else None,
        check=complete,
        notes={"tuned": {**notes_of(tuned.report), "weights_changed": bool(folded.changed)}},
        link=link,
        say=say,
    )
