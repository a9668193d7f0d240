"""Runs a whole tuning: from a checkpoint and a source of text to the tuned model, its report and its folder.

Constants are searched first; a level that learns starts from the best of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropecli.attention import load_model
from ropecli.attention.patching import live_patch, patch_to, unpatched_after
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.writing import write_json
from ropecli.errors import PatchError
from ropecli.evaluation.scoring import refuse_unknown_ids
from ropecli.live.loading import vocabulary_mismatch
from ropecli.scaling.spec import ScalingSpec, label_of, make_spec
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.folding import find_stored, refuse_unwritten, rewrite_shard
from ropecli.tuning.levels import HeadGains, projections_to_train, tune_heads, tune_lora
from ropecli.tuning.parameter_search import evolve, search_constants
from ropecli.tuning.tune_report import TRAINING, Point, Score, TuneReport, files_of, make_report, notes_of
from ropecli.tuning.tuning_run import Tuned, TuningRun, finish, logits_of, refuse_other
from ropecli.tuning.tuning_state import TuningState

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from ropecli.tuning.tuning_settings import Settings, tune_settings
from ropecli.tuning.tuning_task import TuningTask, make_task

_LEVELS_THAT_LEARN = {"heads": tune_heads, "lora": tune_lora}


@dataclass(frozen=True)
class TuneResult:
    """tuned: the plan, and the weights that go with it. report: what was tried and found."""

    tuned: Tuned
    report: TuneReport

    @property
    def plan(self) -> PatchPlan:
        return self.tuned.plan


def tune_checkpoint(
    checkpoint: Checkpoint,
    factor: float,
    source: str,
    settings: Settings | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attn: str = "auto",
    on_point: Callable[[Point], None] = lambda point: None,
    say: Callable[[str], None] = lambda message: None,
    **others: Any,
) -> TuneResult:
    """What `ropecli tune` does, but for keeping how far it came: write_tuned writes the result.

    settings: of tune_settings. say: told what may be amiss. others: of make_task. Raises RopecliError.
    """
    loading = {"dtype": dtype, "device": device, "attn": attn}
    task = make_task(checkpoint, factor, source, settings or tune_settings(), loading=loading, **others)
    model = load_model(checkpoint, dtype=dtype, device=device, attn=attn)
    if mismatch := vocabulary_mismatch(task.tokenizer, model):
        say(mismatch)
    return run_task(task, model, on_point=on_point)


def run_task(
    task: TuningTask,
    model: "PreTrainedModel",
    *,
    state: TuningState | None = None,
    command: Sequence[str] = (),
    on_point: Callable[[Point], None] = lambda point: None,
) -> TuneResult:
    """Measures the model as pretrained and by the baseline patch, and tunes it; it is left as it was tuned.

    state: what an earlier run of the same request left, and where this one leaves its own. command: for the report.
    on_point: told of every measurement. Raises as tune does.
    """
    state, settings = state or TuningState(), task.settings
    documents, sequences = task.calibration.evaluated, task.calibration.sequences
    # the evaluator refuses unknown ids of its own documents
    refuse_unknown_ids(int(sequences.max()), model)
    _refuse_unwritable(task, model)
    evaluator = Evaluator(
        documents, task.original_length, task.target_length, task.short_weight, task.targets, state.progress
    )
    base = _measured(model, settings.plan(task.checkpoint, make_spec("none")), evaluator, "base")
    baseline = _measured(model, task.baseline, evaluator, "plain")

    def keep(point: Point) -> None:
        state.points.add(point)
        on_point(point)

    run = TuningRun(
        task.checkpoint,
        model,
        task.factor,
        evaluator,
        sequences,
        settings,
        snapshots=state.learned,
        on_point=keep,
    )
    tuned = tune(run)
    report = make_report(
        tuned,
        source=task.source,
        fingerprint=task.calibration.fingerprint(),
        settings=task.settings_values(),
        command=command,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        base=base,
        plain=baseline,
        plain_name=_baseline_name(task.baseline.spec),
        points=state.points.all,
    )
    return TuneResult(tuned, report)


def _refuse_unwritable(task: TuningTask, model: "PreTrainedModel") -> None:
    """Before anything is searched. Raises PatchError where what is learned could not be written into the weights."""
    level = task.settings.level
    if level not in TRAINING:
        return
    coarse = torch.finfo(model.dtype).eps
    try:
        if level == "heads":
            weights = list(HeadGains(model, task.baseline.scaled).folded(model))
        else:
            weights = [f"{name}.weight" for name in projections_to_train(model)]
        stored = find_stored(task.checkpoint, model, weights)
    except PatchError as error:
        others = " or ".join(f"--level {other}" for other in ("grid", "lora") if other != level)
        raise PatchError(
            f"--level {level} cannot be had of {task.checkpoint.name}. {error} It can be tuned by {others}."
        ) from error
    if finer := [one for one in stored.values() if torch.finfo(one.dtype).eps < coarse]:
        files, loaded = (str(dtype).removeprefix("torch.") for dtype in (finer[0].dtype, model.dtype))
        raise PatchError(
            f"The weight files of {task.checkpoint.name} hold {files}, and the model is loaded in {loaded}: what "
            f"--level {level} writes would be rounded to it. Load it in {files}, by --dtype {files}."
        )


def _measured(model: "PreTrainedModel", plan: PatchPlan, evaluator: Evaluator, part: str) -> Score:
    with unpatched_after(model):
        live_patch(model, plan.ropes)
        return evaluator.score(model, part)


def _baseline_name(spec: ScalingSpec) -> str:
    chosen = label_of(spec.method.name, spec.factor, spec.params)
    return f"{chosen}, nothing tuned" if chosen == label_of(spec.method.name, spec.factor, {}) else f"{chosen}, a point"


def tune(run: TuningRun) -> Tuned:
    """Runs the level that the settings ask for. The model is left as it was tuned.

    Raises MethodError for a method that cannot be tuned, PatchError for a model whose weights cannot hold what would be
    learned, ProofError, NotFiniteError.
    """
    level = run.settings.level
    plan = evolve(run) if level == "search" else search_constants(run)
    live_patch(run.model, plan.ropes)
    start = run.evaluator.score(run.model, f"{level} 0")
    return _LEVELS_THAT_LEARN[level](run, plan, start) if level in _LEVELS_THAT_LEARN else finish(run, plan, start)


def write_tuned(
    result: TuneResult, output: Path, *, link: bool = True, say: Callable[[str], None] = lambda message: None
) -> int:
    """Writes the checkpoint, with its report as tune.json; returns how many live rotary tables proved it.

    link, say: as patch_to's. Raises OutputError, ProofError; then nothing is left behind.
    """
    report = result.report
    return tuned_to(result.tuned, output, link=link, notes=notes_of(report), files=files_of(report), say=say)


def tuned_to(
    tuned: Tuned,
    output: Path,
    *,
    link: bool = True,
    notes: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> int:
    """Writes the tuned checkpoint, shard by shard, and proves it; returns how many live rotary tables did.

    Stock transformers loads what was written, before it gets its name, and must give the tuned model's logits. link,
    say: as patch_to's. notes: for ropecli.yaml, beside whether weights changed. files: JSON that lies in the folder
    too, by name. Raises OutputError, ProofError; then nothing is left behind.
    """
    return patch_to(
        tuned.plan,
        output,
        link=link,
        say=say,
        rewrite=partial(rewrite_shard, tuned.changed) if tuned.changed else None,
        notes={"tuned": {**(notes or {}), "weights_changed": bool(tuned.changed)}},
        check=partial(_complete, tuned, files or {}),
    )


def _complete(tuned: Tuned, files: Mapping[str, Any], folder: Path) -> None:
    """With the files beside the weights, and proved."""
    for name, value in files.items():
        write_json(folder / name, value)
    written, dtype = open_checkpoint(folder, weights=True), str(tuned.logits.dtype).removeprefix("torch.")
    refuse_unwritten(tuned.changed, written)
    model = load_model(written, dtype=dtype, device="cpu")
    found = logits_of(model, tuned.probe)
    refuse_other(found, tuned.logits, "Stock transformers, loading what was written, gives")
