"""What is tuned, and on what: the checkpoint, its calibration documents, the settings; refuses what cannot be tuned."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.provenance import read_record, tuned_weights, untuned
from ropecli.config.fields import section_of
from ropecli.errors import MethodError, PatchError
from ropecli.evaluation.eval_report import environment
from ropecli.evaluation.protocols import Protocol
from ropecli.live.loading import load_tokenizer, settle
from ropecli.scaling.spec import make_spec
from ropecli.tuning.calibration import MOST_EVALUATED, Calibration, read_calibration
from ropecli.tuning.parameter_search import grid_points, own_constants
from ropecli.tuning.tune_report import TRAINING
from ropecli.tuning.tuning_settings import Settings, refuse_request

_LARGEST_SHORT_WEIGHT = 1e6
"""With more the score at the target length would be lost in the rounding, and the sum overflow."""


@dataclass(frozen=True)
class TuningTask:
    """What is to be tuned, and on what.

    baseline: the patch by a method's own constants, the first method's that has some. short_weight, targets: of the
    evaluator; targets are tokens. loading: dtype, device and attn, as load_model takes them.
    """

    checkpoint: Checkpoint
    tokenizer: Any
    baseline: PatchPlan
    settings: Settings
    source: str
    calibration: Calibration
    short_weight: float = 0.25
    targets: int = 1
    loading: dict[str, str] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        return self.baseline.spec.factor

    @property
    def original_length(self) -> int:
        """The pretraining length, tokens."""
        return self.baseline.ropes[self.baseline.scaled[0]].geometry.original_max_position_embeddings

    @property
    def target_length(self) -> int:
        """Tokens."""
        return self.baseline.target_length

    def settings_values(self) -> dict[str, Any]:
        """The settings as plain values."""
        own, schedule, evolution = self.settings, self.settings.schedule, self.settings.evolution
        return {
            "level": own.level,
            "methods": list(own.methods),
            "points": own.points,
            "short_weight": self.short_weight,
            "targets": self.targets,
            "judged": len(self.calibration.evaluated.kept),
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
    settings: Settings,
    *,
    short_weight: float = 0.25,
    targets: int | None = None,
    max_documents: int | None = None,
    text_column: str = "text",
    split: str | None = None,
    loading: dict[str, str] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> TuningTask:
    """Reads the calibration documents, once nothing else stands against the tuning.

    targets: tokens scored of each document; None: half the
    pretraining length. max_documents: read at most so many; None: as many
    as are learned from and scored. advance: called after each document. Raises MethodError, PatchError,
    CheckpointError, DataError.
    """
    refuse_request(settings.level, settings.methods, factor, source)
    if not 0 <= short_weight <= _LARGEST_SHORT_WEIGHT:
        raise MethodError(
            f"--short-weight is {short_weight:g}; it must be a number from 0 to {_LARGEST_SHORT_WEIGHT:,.0f}."
        )
    baseline = _baseline_plan(checkpoint, factor, settings)
    _refuse_weights(checkpoint, settings.level)
    # after the plan: transformers reads config.json for it, and says less of what is wrong there
    tokenizer = load_tokenizer(checkpoint)
    most = max_documents or MOST_EVALUATED + settings.schedule.steps * settings.schedule.batch_size
    calibration = read_calibration(
        source,
        tokenizer,
        baseline.target_length,
        most=most,
        seed=settings.seed,
        text_column=text_column,
        split=split,
        advance=advance,
    )
    task = TuningTask(
        checkpoint, tokenizer, baseline, settings, source, calibration, short_weight, loading=dict(loading or {})
    )
    lengths = sorted({task.original_length, task.target_length})
    settled = Protocol("tail", targets=targets).settled(lengths, calibration.evaluated.special)
    return replace(task, targets=settled.targets or 1)


def _baseline_plan(checkpoint: Checkpoint, factor: float, settings: Settings) -> PatchPlan:
    """What tuning is held against. Raises MethodError and PatchError for what could not be written in the end."""
    geometry = settings.geometry(checkpoint)
    specs = [grid_points(geometry, method, factor, 1, settings.seed)[0] for method in settings.methods]
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
