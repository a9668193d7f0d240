"""Make, run and write a tuning task.

Constants are searched first; the level `heads` trains from the best of them.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ropecli.attention import load_model
from ropecli.attention.patching import live_patch, patch_to
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.provenance import tuned_weights, untuned
from ropecli.checkpoint.writing import write_json
from ropecli.data.sources import Source
from ropecli.errors import NotFiniteError, PatchError
from ropecli.evaluation.driver import Store
from ropecli.evaluation.progress import Progress
from ropecli.evaluation.readers.live import LiveReader, refuse_unknown_ids
from ropecli.evaluation.report import environment
from ropecli.live.devices import device_names
from ropecli.live.loading import load_tokenizer
from ropecli.live.rotary import unpatched_after
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.calibration import MOST_EVALUATED, PointScorer, TuningTask, read_calibration
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
from ropecli.tuning.heads import HeadGains
from ropecli.tuning.learning import Learned, learn
from ropecli.tuning.search import evolve, first_default, grid_points, planned_tokens, search_constants
from ropecli.tuning.task import Point, Score, TuneReport, TuneSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 64
"""Tokens of the probe, for comparing the logits of the tuned model and the written checkpoint."""


def make_task(
    checkpoint: Checkpoint,
    factor: float,
    source: Source,
    settings: TuneSettings,
    *,
    loading: dict[str, Any] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> TuningTask:
    """Plan the baseline patch and read the calibration documents.

    advance: called after each document. Raises MethodError, PatchError, CheckpointError, DataError.
    """
    if tuned_weights(checkpoint.record):
        raise PatchError(
            f"{checkpoint.name} is already tuned: `ropecli tune` changed its weights for another scaling. Tune the "
            f"original checkpoint, {untuned(checkpoint.record)}."
        )
    baseline = _baseline_plan(checkpoint, factor, settings)
    # after the plan: loading the tokenizer also reads config.json, but with less helpful error messages
    tokenizer = load_tokenizer(checkpoint)
    calibration = read_calibration(
        source,
        tokenizer,
        baseline.positions.context_length,
        most=settings["max_documents"] or MOST_EVALUATED + settings["steps"] * settings["batch_size"],
        seed=settings["seed"],
        advance=advance,
    )
    return TuningTask(checkpoint, settings, source.place, tokenizer, baseline, calibration, dict(loading or {}))


def _baseline_plan(checkpoint: Checkpoint, factor: float, settings: TuneSettings) -> PatchPlan:
    """Plan the patch to compare the result with. Raises MethodError, PatchError."""
    plan_of = partial(make_plan, checkpoint, original_length=settings["original_length"])
    unscaled = plan_of(make_spec("none"))
    geometry = unscaled.positions.main.geometry
    specs = [grid_points(geometry, method, factor, 1, settings["seed"])[0] for method in settings["methods"]]
    if settings["level"] == "search":
        specs.append(make_spec("longrope", factor, {"long_factor": [1.0] * (geometry.rotary_dim // 2)}))
    plans = [*map(plan_of, specs)]
    return plans[first_default(specs)]


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
    run = _Tuning(task, model, folder, on_point)
    gains, stored = run.make_gains() if task.settings["level"] == "heads" else (None, {})
    with run.shown():
        base, _ = run.score_patched(task.plan(make_spec("none")))
        untuned, _ = run.score_patched(task.baseline)
        plan = task.plan(run.search())
        start, _ = run.score_patched(plan)
    live_patch(model, plan.positions.ropes)
    best, folded = Learned(0, start), None
    if gains:
        best, folded = run.train(gains, stored, plan, start)
    learned: dict[str, Any] = {"learned": gains.count, **gains.record()} if gains and folded else {"learned": 0}
    folded = folded or Folded(logits_of(model, run.probe))
    rope, baseline = plan.positions.main, task.baseline.spec
    report = TuneReport(
        checkpoint=task.checkpoint.name,
        digest=task.checkpoint.digest(),
        level=task.settings["level"],
        factor=plan.spec.factor,
        original_max_position_embeddings=task.positions.pretraining_length,
        target_length=task.positions.context_length,
        source=task.source,
        fingerprint=task.calibration.fingerprint(),
        dtype=short_name(model.dtype),
        device=device_names(model),
        command=list(command),
        settings=task.settings_values(),
        method=plan.spec.method.name,
        params=dict(plan.spec.params),
        attention_factor=float(rope.attention_factor),
        inv_freq=rope.inv_freq.tolist(),
        pretrained_inv_freq=rope.geometry.inv_freq().tolist(),
        untuned_name=f"{baseline.label}, {'first grid point' if baseline.params else 'nothing tuned'}",
        base=base,
        untuned=untuned,
        start=start,
        score=best.score,
        step=best.step,
        rounding=folded.rounding,
        seconds=sum(point.seconds for point in run.points),
        points=run.points,
        environment=environment(),
        **learned,
    )
    return Tuned(plan, folded, run.probe, report)


class _Tuning:
    """The model being tuned, and the measurements so far."""

    def __init__(
        self, task: TuningTask, model: "PreTrainedModel", folder: Path | None, on_point: Callable[[Point], None]
    ) -> None:
        self.task, self.model, self._folder, self._on_point = task, model, folder, on_point
        self.points: list[Point] = []
        documents = task.calibration.evaluated
        self.probe = torch.from_numpy(documents.kept[0].ids[:_PROBE_TOKENS])[None]
        self.scorer = PointScorer(
            documents,
            task.positions.pretraining_length,
            task.positions.context_length,
            task.settings["short_weight"],
            task.settings["targets"],
            Store(folder),
        )
        refuse_unknown_ids(int(task.calibration.sequences.max()), model)  # the scorer checks the others

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the tokens that the search reads, and say if the whole run takes hours."""
        read = trained = 0
        if self.scorer.store.is_empty:  # the rest of a resumed run is not known
            at = self.scorer
            read, trained = planned_tokens(
                self.task.settings, len(at.documents.kept), at.original_length, at.target_length
            )
        advice = " An interrupted run continues with --resume." if self._folder else ""
        # a training step reads twice, and its backward pass takes as long again
        length = self.scorer.target_length
        progress = Progress([{length: read}, {length: 4 * trained}], advice, "Tuning")
        reader = LiveReader(self.model)
        with progress.shown(), progress.job(f"searching, {self.task.settings['level']}", reader):
            progress.begin(length, read)
            yield

    def make_gains(self) -> tuple[HeadGains, dict[str, StoredWeight]]:
        """The parameters to train, and the weights in the files that will hold them. Raises PatchError."""
        try:
            gains = HeadGains(self.model, tuple(self.task.baseline.written))
            return gains, find_stored(self.task.checkpoint, self.model, gains.weights)
        except PatchError as error:
            raise PatchError(
                f"{self.task.checkpoint.name} does not support --level heads. {error} Use --level grid, which does not "
                "change weights."
            ) from error

    def score_patched(self, plan: PatchPlan, documents: int | None = None) -> tuple[Score, float]:
        """The score of the model with this patch, and its seconds. The model is restored."""
        with unpatched_after(self.model):
            live_patch(self.model, plan.positions.ropes)
            return self.scorer.score(self.model, str(plan.spec), documents)

    def search(self) -> ScalingSpec:
        """Find the best constants, or for --level search the best factors."""
        task, geometry = self.task, self.task.positions.main.geometry
        level, search = ("search", evolve) if task.settings["level"] == "search" else ("grid", search_constants)

        def measure(spec: ScalingSpec, documents: int, iteration: int) -> float:
            plan, started = task.plan(spec), time.perf_counter()
            try:
                score, seconds = self.score_patched(plan, documents)
            except NotFiniteError:
                score, seconds = Score(math.inf, math.inf, math.inf, documents), time.perf_counter() - started
            self._add(level, plan.spec, score, seconds, step=iteration)
            return score.objective

        return search(geometry, task.factor, task.settings, len(task.calibration.evaluated.kept), measure)

    def train(
        self, gains: HeadGains, stored: dict[str, StoredWeight], plan: PatchPlan, start: Score
    ) -> tuple[Learned, Folded | None]:
        """Train, and fold the result into the model if it is better."""

        def on_score(learned: Learned) -> None:
            step, score, seconds = learned
            self._add("heads", plan.spec, score, seconds, step=step, learned=gains.count)

        with gains.live():
            best = learn(
                self.model,
                gains.groups,
                self.task.calibration.sequences,
                self.scorer,
                self.task.settings,
                start=start,
                snapshots=self._folder / "learned" if self._folder else None,
                on_score=on_score,
            )
            live, weights = exact_logits(self.model, self.probe), gains.folded()
        return best, fold(self.model, weights, stored, live, self.probe) if best.step else None

    def _add(self, level: str, spec: ScalingSpec, score: Score, seconds: float, **counts: int) -> None:
        point = Point(level, spec.method.name, spec.factor, dict(spec.params), score, seconds, **counts)
        self.points.append(point)
        self._on_point(point)


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
    folded, report = tuned.folded, tuned.report

    notes = {
        "checkpoint": report.checkpoint,
        "level": report.level,
        "scaling": report.label,
        "data": report.source,
        "fingerprint": report.fingerprint,
        "seed": report.settings["seed"],
        "points": len(report.points),
        "steps": report.step,
        "learned": report.learned,
        "weights_changed": bool(folded.changed),
    }

    def complete(folder: Path) -> None:
        for name, value in report.files().items():
            write_json(folder / name, value)
        written = open_checkpoint(folder, weights=True)
        model = load_model(written, **(loading or {"dtype": short_name(folded.logits.dtype), "device": "cpu"}))
        require_same(logits_of(model, tuned.probe), folded.logits, "the written checkpoint in stock transformers")

    return patch_to(
        tuned.plan,
        output,
        rewrite=partial(rewrite_shard, folded.changed) if folded.changed else None,
        check=complete,
        notes={"tuned": notes},
        link=link,
        say=say,
    )
