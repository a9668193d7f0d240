"""The task of a tuning run: checkpoint, baseline patch and calibration documents."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ropecli.attention import load_model
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.provenance import read_record, tuned_weights, untuned
from ropecli.checkpoint.state import read_state
from ropecli.errors import MethodError, PatchError
from ropecli.evaluation.protocols import Protocol, short_context
from ropecli.evaluation.retrieval.templates import STYLES, default_style
from ropecli.evaluation.subject import loading_request
from ropecli.live.loading import load_tokenizer
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.calibration import MOST_EVALUATED, Calibration, hide_needles, mark_keys, read_calibration
from ropecli.tuning.search import grid_points, own_constants
from ropecli.tuning.tune_settings import TuneSettings


@dataclass(frozen=True)
class TuningTask:
    """The checkpoint to tune and everything that the result depends on.

    baseline: the patch to compare with: the default constants of the first method that has defaults. loading: the
    arguments of load_model.
    """

    checkpoint: Checkpoint
    settings: TuneSettings
    source: str
    tokenizer: Any
    baseline: PatchPlan
    calibration: Calibration
    loading: dict[str, Any] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        return self.baseline.spec.factor

    @property
    def geometry(self) -> RopeGeometry:
        return self.baseline.ropes[self.baseline.scaled[0]].geometry

    @property
    def original_length(self) -> int:
        """The pretraining length, tokens."""
        return self.geometry.original_max_position_embeddings

    @property
    def target_length(self) -> int:
        """Tokens."""
        return self.baseline.target_length

    @property
    def targets(self) -> int | None:
        """Tokens scored per document; None: half the pretraining length."""
        return self.calibration.targets or self.settings.targets

    def plan(self, spec: ScalingSpec) -> PatchPlan:
        return make_plan(self.checkpoint, spec, original_length=self.settings.original_length)

    def settings_values(self) -> dict[str, Any]:
        """The settings as stored in tune.json. Raises DataError for targets that do not fit the lengths."""
        lengths = sorted({self.original_length, self.target_length})
        protocol = Protocol("tail", targets=self.targets)
        return {
            **asdict(self.settings),
            "methods": list(self.settings.methods),
            "targets": protocol.settled(lengths, self.calibration.evaluated.special).targets,
            "judged": len(self.calibration.evaluated.kept),
            "sequences": len(self.calibration.sequences),
        }

    def request(self) -> dict[str, Any]:
        """Everything that the results depend on. A run resumes only if it is unchanged."""
        return {
            "checkpoint": self.checkpoint.digest(),
            "factor": self.factor,
            "window": self.original_length,
            "target": self.target_length,
            **self.settings_values(),
            "data": self.calibration.fingerprint(),
            **loading_request(self.loading),
        }


def make_task(
    checkpoint: Checkpoint,
    factor: float,
    source: str,
    settings: TuneSettings,
    *,
    text_column: str = "text",
    split: str | None = None,
    whole: bool = True,
    loading: dict[str, Any] | None = None,
    evaluator: Checkpoint | None = None,
    advance: Callable[[], None] = lambda: None,
) -> TuningTask:
    """Plan the baseline patch and read the calibration documents.

    whole: see read_texts. evaluator: for the objective longppl. advance: called after each document. Raises
    MethodError, PatchError, CheckpointError, DataError.
    """
    record = read_record(checkpoint.folder)
    if tuned_weights(record):
        raise PatchError(
            f"{checkpoint.name} is already tuned: `ropecli tune` changed its weights for another scaling. Tune the "
            f"original checkpoint, {untuned(record)}."
        )
    baseline = _baseline_plan(checkpoint, factor, settings)
    # after the plan: loading the tokenizer also reads config.json, but with less helpful error messages
    tokenizer = load_tokenizer(checkpoint)
    calibration = read_calibration(
        source,
        tokenizer,
        baseline.target_length,
        whole=whole,
        most=settings.max_documents or MOST_EVALUATED + settings.steps * settings.batch_size,
        seed=settings.seed,
        text_column=text_column,
        split=split,
        advance=advance,
    )
    task = TuningTask(checkpoint, settings, source, tokenizer, baseline, calibration, dict(loading or {}))
    if settings.objective == "ppl":
        return task
    if evaluator is not None:
        return replace(task, calibration=_with_keys(task, evaluator))
    templates = STYLES[default_style(source)]
    lengths = task.original_length, task.target_length
    return replace(task, calibration=hide_needles(calibration, tokenizer, templates, *lengths, settings.seed))


def _with_keys(task: TuningTask, evaluator: Checkpoint) -> Calibration:
    if load_tokenizer(evaluator).get_vocab() != task.tokenizer.get_vocab():
        raise MethodError(f"The evaluator {evaluator.name} has another tokenizer than {task.checkpoint.name}.")
    model, pretrained = load_model(evaluator, **task.loading), read_state(evaluator).pretraining_length
    return mark_keys(task.calibration, model, short_context(pretrained), task.original_length)


def _baseline_plan(checkpoint: Checkpoint, factor: float, settings: TuneSettings) -> PatchPlan:
    """Plan the patch to compare the result with.

    Raises MethodError, and PatchError also for methods that config.json cannot express.
    """

    def plan_of(spec: ScalingSpec) -> PatchPlan:
        return make_plan(checkpoint, spec, original_length=settings.original_length)

    unscaled = plan_of(make_spec("none"))
    geometry = unscaled.ropes[unscaled.scaled[0]].geometry
    specs = [grid_points(geometry, method, factor, 1, settings.seed)[0] for method in settings.methods]
    if settings.level == "search":
        specs.append(make_spec("longrope", factor, {"long_factor": [1.0] * (geometry.rotary_dim // 2)}))
    plans = [plan_of(spec) for spec in specs]
    for plan in plans:
        if plan.unwritable:
            raise PatchError(plan.unwritable)
    return plans[own_constants(specs)]
