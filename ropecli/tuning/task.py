"""The settings of a tuning run, and the task: the checkpoint, its baseline patch and its calibration documents."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.provenance import read_record, tuned_weights, untuned
from ropecli.errors import MethodError, PatchError, did_you_mean
from ropecli.evaluation.eval_report import environment
from ropecli.evaluation.protocols import Protocol
from ropecli.live.loading import load_tokenizer, settle
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.calibration import MOST_EVALUATED, Calibration, read_calibration
from ropecli.tuning.search import grid_points, own_constants
from ropecli.tuning.tune_report import LEVELS


@dataclass(frozen=True)
class TuneSettings:
    """The settings of a tuning run. Raises MethodError.

    level: grid, heads, lora or search. methods: the methods whose constants are searched; points: how many constants
    are tried in all. short_weight: weight of the loss at the pretraining length, relative to that at the target length.
    targets: tokens scored per document; None: half the pretraining length. max_documents: documents to read at most;
    None: enough for scoring and for all steps. original_length: the true pretraining length, tokens, where config.json
    names another.

    heads and lora: steps, batch_size (sequences per step), rank (lora), evaluate_every (steps), patience (scores in a
    row without improvement that end the training).

    search: as published (arXiv:2402.13753, section 4 and appendix A), except search_documents, the number of documents
    that score each candidate, which is our choice.
    """

    level: str = "heads"
    methods: tuple[str, ...] = ("yarn",)
    points: int = 24
    short_weight: float = 0.25
    targets: int | None = None
    max_documents: int | None = None
    original_length: int | None = None
    seed: int = 0
    steps: int = 100
    batch_size: int = 4
    rank: int = 4
    evaluate_every: int = 10
    patience: int = 4
    search_population: int = 64
    search_iterations: int = 40
    search_mutations: int = 16
    search_crossovers: int = 16
    search_parents: int = 32
    search_documents: int = 4

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise MethodError(
                f"--level is {self.level!r}; it must be one of {', '.join(LEVELS)}.{did_you_mean(self.level, LEVELS)}"
            )
        if not self.methods:
            raise MethodError("--methods names no method; `ropecli methods` shows them all.")
        for method in map(find_method, self.methods):
            if method.remaps or method.depends_on_length:
                raise MethodError(
                    f"{method.name} cannot be tuned: only methods with one table of frequencies can, such as yarn, "
                    "ntk, abf or llama3."
                )


@dataclass(frozen=True)
class TuningTask:
    """The checkpoint to tune and everything that the result depends on.

    baseline: the patch to compare with, by a method's own constants (of the first method that has some). loading:
    dtype, device and attn for load_model.
    """

    checkpoint: Checkpoint
    settings: TuneSettings
    source: str
    tokenizer: Any
    baseline: PatchPlan
    calibration: Calibration
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
        """The settings as tune.json holds them. Raises DataError for targets that do not fit the lengths."""
        lengths = sorted({self.original_length, self.target_length})
        protocol = Protocol("tail", targets=self.settings.targets)
        return {
            **asdict(self.settings),
            "methods": list(self.settings.methods),
            "targets": protocol.settled(lengths, self.calibration.evaluated.special).targets,
            "judged": len(self.calibration.evaluated.kept),
            "sequences": len(self.calibration.sequences),
        }

    def request(self) -> dict[str, Any]:
        """Everything that the numbers depend on; it must be the same for a run to be resumed."""
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
    record = read_record(checkpoint.folder)
    if tuned_weights(record):
        raise PatchError(
            f"{checkpoint.name} was tuned already: its weights hold what `ropecli tune` learned for another scaling. "
            f"Tune the checkpoint that it was made of, {untuned(record)}."
        )
    baseline = _baseline_plan(checkpoint, factor, settings)
    # after the plan: transformers reads config.json for the tokenizer, with a less helpful message where it is wrong
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
    return TuningTask(checkpoint, settings, source, tokenizer, baseline, calibration, dict(loading or {}))


def _baseline_plan(checkpoint: Checkpoint, factor: float, settings: TuneSettings) -> PatchPlan:
    """The patch that the result is compared with.

    Raises MethodError and PatchError, also for a method whose result could not be written.
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
