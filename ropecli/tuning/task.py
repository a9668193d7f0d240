"""What is tuned, and on what: the checkpoint, its baseline patch and its calibration documents."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.provenance import read_record, tuned_weights, untuned
from ropecli.errors import PatchError
from ropecli.evaluation.eval_report import environment
from ropecli.evaluation.protocols import Protocol
from ropecli.live.loading import load_tokenizer, settle
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.calibration import MOST_EVALUATED, Calibration, read_calibration
from ropecli.tuning.search import grid_points, own_constants
from ropecli.tuning.tune_settings import TuneSettings

_SEARCH = ("population", "iterations", "mutations", "crossovers", "parents", "documents")
"""The settings that tune.json calls search_..."""


@dataclass(frozen=True)
class TuningTask:
    """What is to be tuned, and on what.

    baseline: the patch by a method's own constants, the first method's that has some. targets: tokens scored of each
    document. loading: dtype, device and attn, as load_model takes them.
    """

    checkpoint: Checkpoint
    settings: TuneSettings
    source: str
    tokenizer: Any
    baseline: PatchPlan
    calibration: Calibration
    targets: int = 1
    loading: dict[str, str] = field(default_factory=dict)

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

    def plan(self, spec: ScalingSpec) -> PatchPlan:
        return make_plan(self.checkpoint, spec, original_length=self.settings.original_length)

    def settings_values(self) -> dict[str, Any]:
        """The settings as tune.json holds them."""
        named = {f"search_{key}" if key in _SEARCH else key: value for key, value in asdict(self.settings).items()}
        return {
            **named,
            "methods": list(self.settings.methods),
            "targets": self.targets,
            "judged": len(self.calibration.evaluated.kept),
            "sequences": len(self.calibration.sequences),
        }

    def request(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed: all that the numbers depend on."""
        dtype, device = settle(self.loading.get("dtype", "auto"), self.loading.get("device", "auto"))
        return {
            "checkpoint": self.checkpoint.digest(),
            "factor": self.factor,
            "window": self.original_length,
            "target": self.target_length,
            **self.settings_values(),
            "data": self.calibration.fingerprint(),
            "dtype": dtype,
            "device": device.partition(":")[0],
            "attn": self.loading.get("attn", "auto"),
            "versions": environment(),
        }


def make_task(
    checkpoint: Checkpoint,
    factor: float,
    source: str,
    settings: TuneSettings,
    *,
    text_column: str = "text",
    split: str | None = None,
    loading: dict[str, str] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> TuningTask:
    """Plans the baseline patch and reads the calibration documents. advance: called after each document.

    Raises MethodError, PatchError, CheckpointError, DataError.
    """
    _refuse_tuned(checkpoint)
    baseline = _baseline_plan(checkpoint, factor, settings)
    # after the plan: transformers reads config.json for it, and says less of what is wrong there
    tokenizer = load_tokenizer(checkpoint)
    calibration = read_calibration(
        source,
        tokenizer,
        baseline.target_length,
        most=settings.max_documents or MOST_EVALUATED + settings.steps * settings.batch_size,
        seed=settings.seed,
        text_column=text_column,
        split=split,
        advance=advance,
    )
    task = TuningTask(checkpoint, settings, source, tokenizer, baseline, calibration, loading=dict(loading or {}))
    lengths = sorted({task.original_length, task.target_length})
    protocol = Protocol("tail", targets=settings.targets).settled(lengths, calibration.evaluated.special)
    return replace(task, targets=protocol.targets or 1)


def _baseline_plan(checkpoint: Checkpoint, factor: float, settings: TuneSettings) -> PatchPlan:
    """What tuning is compared with. Raises MethodError and PatchError for what could not be written in the end."""

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


def _refuse_tuned(checkpoint: Checkpoint) -> None:
    """Raises PatchError for weights that hold what an earlier tuning learned for another scaling."""
    record = read_record(checkpoint.folder)
    if tuned_weights(record):
        raise PatchError(
            f"{checkpoint.name} was tuned already: its weights hold what `ropecli tune` learned. Tune the checkpoint "
            f"that it was made of, {untuned(record)}."
        )
