"""A whole tuning: from a checkpoint and a source of text to the tuned model, its report, and the folder it becomes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropecli.attention.patching import live_patch, unpatched_after
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.provenance import read_record, tuned_weights, untuned
from ropecli.config.fields import section_of
from ropecli.errors import MethodError, PatchError
from ropecli.evaluation.eval_report import environment
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.scoring import refuse_unknown_ids
from ropecli.live.loading import load_model, load_tokenizer, settle, vocabulary_mismatch
from ropecli.scaling.spec import ScalingSpec, label_of, make_spec
from ropecli.tuning.calibration import MOST_JUDGED, Calibration, read_calibration
from ropecli.tuning.folding import find_stored
from ropecli.tuning.gains import HeadGains
from ropecli.tuning.judge import Judge
from ropecli.tuning.keeping import Kept
from ropecli.tuning.matrices import projections_to_train
from ropecli.tuning.record import TRAINING, Point, Score, TuneReport
from ropecli.tuning.reporting import files_of, make_report, notes_of
from ropecli.tuning.request import refuse_request
from ropecli.tuning.run import Evolution, Run, Settings, Tuned
from ropecli.tuning.space import own_constants, points
from ropecli.tuning.training import Schedule
from ropecli.tuning.tuning import tune, tuned_to

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAVIEST = 1e6
"""Of weights for the window: with more the target would be lost in the rounding, and the sum overflow."""


@dataclass(frozen=True)
class Task:
    """What is to be tuned, and on what.

    plain: the patch by a method's own constants, the first method's that has some. short_weight, targets: of the judge;
    targets are tokens. loading: dtype, device and attn, as load_model takes them.
    """

    checkpoint: Checkpoint
    tokenizer: Any
    plain: PatchPlan
    settings: Settings
    source: str
    calibration: Calibration
    short_weight: float = 0.25
    targets: int = 1
    loading: dict[str, str] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        return self.plain.spec.factor

    @property
    def window(self) -> int:
        """The pretraining window, tokens."""
        return self.plain.ropes[self.plain.scaled[0]].geometry.original_max_position_embeddings

    @property
    def target(self) -> int:
        """Tokens."""
        return self.plain.target_length

    def asked(self) -> dict[str, Any]:
        """The settings as plain values."""
        own, schedule, evolution = self.settings, self.settings.schedule, self.settings.evolution
        return {
            "level": own.level,
            "methods": list(own.methods),
            "points": own.points,
            "short_weight": self.short_weight,
            "targets": self.targets,
            "judged": len(self.calibration.judged.kept),
            "sequences": len(self.calibration.sequences),
            "steps": schedule.steps,
            "batch_size": schedule.batch_size,
            "rank": own.rank,
            "original_length": own.original_length,
            "seed": own.seed,
            **{f"search_{key}": value for key, value in asdict(evolution).items()},
        }

    def request(self) -> dict[str, Any]:
        """What must be the same for a run to be gone on with: all that the numbers depend on."""
        dtype, device = settle(self.loading.get("dtype", "auto"), self.loading.get("device", "auto"))
        return {
            "checkpoint": self.checkpoint.digest(),
            "factor": self.factor,
            "window": self.window,
            "target": self.target,
            **self.asked(),
            "data": self.calibration.fingerprint(),
            "dtype": dtype,
            "device": device.partition(":")[0],
            "attn": self.loading.get("attn", "auto"),
            "versions": environment(),
        }


@dataclass(frozen=True)
class TuneResult:
    """tuned: the plan, and the weights that go with it. report: what was tried and found."""

    tuned: Tuned
    report: TuneReport

    @property
    def plan(self) -> PatchPlan:
        return self.tuned.plan


def tune_settings(
    level: str = "heads",
    *,
    methods: Sequence[str] = ("yarn",),
    points: int = 24,
    steps: int = 100,
    batch_size: int = 4,
    rank: int = 4,
    population: int = 64,
    iterations: int = 40,
    seed: int = 0,
    original_length: int | None = None,
) -> Settings:
    """level: grid, heads, lora or search. points: of all methods together. steps, batch_size: of heads and lora; rank:
    of lora; population, iterations: of search. original_length: the true pretraining window, tokens, where config.json
    names another. Raises MethodError.
    """
    schedule = Schedule(steps=steps, batch_size=batch_size, seed=seed)
    evolution = Evolution(population=population, iterations=iterations)
    return Settings(level, tuple(methods), points, rank, schedule, evolution, seed, original_length)


def make_task(
    checkpoint: Checkpoint,
    factor: float,
    source: str,
    settings: Settings,
    *,
    short_weight: float = 0.25,
    targets: int | None = None,
    max_documents: int | None = None,
    text_column: str = "text",
    split: str | None = None,
    loading: dict[str, str] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Task:
    """Reads the calibration documents, once nothing else stands against the tuning.

    targets: tokens scored of each document; None: half the window. max_documents: read at most so many; None: as many
    as are learned from and judged by. advance: called after each document. Raises MethodError, PatchError,
    CheckpointError, DataError.
    """
    refuse_request(settings.level, settings.methods, factor, source)
    if not 0 <= short_weight <= _HEAVIEST:
        raise MethodError(f"--short-weight is {short_weight:g}; it must be a number from 0 to {_HEAVIEST:,.0f}.")
    plain = _plain(checkpoint, factor, settings)
    _refuse_weights(checkpoint, settings.level)
    # after the plan: transformers reads config.json for it, and says less of what is wrong there
    tokenizer = load_tokenizer(checkpoint)
    most = max_documents or MOST_JUDGED + settings.schedule.steps * settings.schedule.batch_size
    calibration = read_calibration(
        source,
        tokenizer,
        plain.target_length,
        most=most,
        seed=settings.seed,
        text_column=text_column,
        split=split,
        advance=advance,
    )
    task = Task(checkpoint, tokenizer, plain, settings, source, calibration, short_weight, loading=dict(loading or {}))
    lengths = sorted({task.window, task.target})
    settled = Protocol("tail", targets=targets).settled(lengths, calibration.judged.special)
    return replace(task, targets=settled.targets or 1)


def _plain(checkpoint: Checkpoint, factor: float, settings: Settings) -> PatchPlan:
    """What tuning is held against. Raises MethodError and PatchError for what could not be written in the end."""
    geometry = settings.geometry(checkpoint)
    specs = [points(geometry, method, factor, 1, settings.seed)[0] for method in settings.methods]
    if settings.level == "search":
        ones = make_spec("longrope", factor, {"long_factor": [1.0] * (geometry.rotary_dim // 2)})
        specs.append(ones)
    plans = [settings.plan(checkpoint, spec) for spec in specs]
    for plan in plans:
        if plan.unwritable:
            raise PatchError(plan.unwritable)
    return plans[own_constants(specs)]


def _refuse_weights(checkpoint: Checkpoint, level: str) -> None:
    """Raises PatchError for weights that hold an earlier tuning, or that are no numbers to be changed."""
    record = read_record(checkpoint.folder)
    if tuned_weights(record):
        raise PatchError(
            f"{checkpoint.name} was tuned already: its weights hold what `ropecli tune` learned. Tune the checkpoint "
            f"that it was made of, {untuned(record)}."
        )
    quantised = any("quantization_config" in part for part in (checkpoint.config, section_of(checkpoint.config)))
    if quantised and level in TRAINING:
        raise PatchError(
            f"The weights of {checkpoint.name} are quantised: what --level {level} learns cannot be folded into them. "
            "Tune the constants alone by --level grid, or the model in full precision."
        )


def run_task(
    task: Task,
    model: "PreTrainedModel",
    *,
    kept: Kept | None = None,
    command: Sequence[str] = (),
    on_point: Callable[[Point], None] = lambda point: None,
) -> TuneResult:
    """Measures the model as pretrained and by the plain patch, and tunes it; it is left as it was tuned.

    kept: what an earlier run of the same request left, and where this one leaves its own. command: for the report.
    on_point: told of every measurement. Raises as tune does.
    """
    kept, settings = kept or Kept(), task.settings
    documents, sequences = task.calibration.judged, task.calibration.sequences
    # the judge looks after his own
    refuse_unknown_ids(int(sequences.max()), model)
    _refuse_unwritable(task, model)
    judge = Judge(documents, task.window, task.target, task.short_weight, task.targets, kept.progress)
    base = _measured(model, settings.plan(task.checkpoint, make_spec("none")), judge, "base")
    plain = _measured(model, task.plain, judge, "plain")

    def keep(point: Point) -> None:
        kept.points.add(point)
        on_point(point)

    run = Run(task.checkpoint, model, task.factor, judge, sequences, settings, state=kept.state, on_point=keep)
    tuned = tune(run)
    report = make_report(
        tuned,
        source=task.source,
        fingerprint=task.calibration.fingerprint(),
        settings=task.asked(),
        command=command,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        base=base,
        plain=plain,
        plain_name=_plain_name(task.plain.spec),
        points=kept.points.all,
    )
    return TuneResult(tuned, report)


def _plain_name(spec: ScalingSpec) -> str:
    chosen = label_of(spec.method.name, spec.factor, spec.params)
    return f"{chosen}, nothing tuned" if chosen == label_of(spec.method.name, spec.factor, {}) else f"{chosen}, a point"


def _measured(model: "PreTrainedModel", plan: PatchPlan, judge: Judge, part: str) -> Score:
    with unpatched_after(model):
        live_patch(model, plan.ropes)
        return judge.score(model, part)


def _refuse_unwritable(task: Task, model: "PreTrainedModel") -> None:
    """Before anything is searched. Raises PatchError where what is learned could not be written into the weights."""
    level = task.settings.level
    if level not in TRAINING:
        return
    coarse = torch.finfo(model.dtype).eps
    try:
        if level == "heads":
            weights = list(HeadGains(model, task.plain.scaled).folded(model))
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


def write_tuned(
    result: TuneResult, output: Path, *, link: bool = True, say: Callable[[str], None] = lambda message: None
) -> int:
    """Writes the checkpoint, with its report as tune.json; returns how many live rotary tables proved it.

    link, say: as patch_to's. Raises OutputError, ProofError; then nothing is left behind.
    """
    report = result.report
    return tuned_to(result.tuned, output, link=link, notes=notes_of(report), files=files_of(report), say=say)


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
