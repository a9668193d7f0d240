"""The settings of a tuning run, and what is refused before a model library is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.data.sources import DEMO, read_texts
from ropecli.errors import DataError, MethodError, did_you_mean
from ropecli.rope import RopeGeometry
from ropecli.scaling.method import ScalingMethod
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScalingSpec, check_factor, make_spec
from ropecli.tuning.tune_report import LEVELS


@dataclass(frozen=True)
class Schedule:
    """batch_size: sequences a step. rates: of each group of parameters at the start; they fall by a cosine to zero.

    evaluate_every: steps between two scores. patience: scores in a row that are no better, and end the training.
    Raises MethodError for a count below 1.
    """

    steps: int = 100
    batch_size: int = 4
    rates: tuple[float, ...] = ()
    evaluate_every: int = 10
    patience: int = 4
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "evaluate_every", "patience"):
            if (value := getattr(self, name)) < 1:
                raise MethodError(f"{name} is {value}; it must be at least 1.")


@dataclass(frozen=True)
class Evolution:
    """The sizes of LongRoPE's search, as published (arXiv:2402.13753, section 4 and appendix A). documents: read for
    each, our choice. Raises MethodError.
    """

    population: int = 64
    iterations: int = 40
    mutations: int = 16
    crossovers: int = 16
    parents: int = 32
    documents: int = 4

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 1 if name in ("population", "parents", "documents") else 0
            if value < least:
                raise MethodError(f"The search's {name} are {value}; they must be at least {least}.")


@dataclass(frozen=True)
class Settings:
    """level: grid, heads, lora or search. methods: whose constants are searched; points: how many in all.

    rank: of LoRA's matrices. schedule: of what learns. evolution: of the evolutionary search. original_length: the true
    pretraining length, tokens, where config.json names another. Raises MethodError.
    """

    level: str = "heads"
    methods: tuple[str, ...] = ("yarn",)
    points: int = 24
    rank: int = 4
    schedule: Schedule = field(default_factory=Schedule)
    evolution: Evolution = field(default_factory=Evolution)
    seed: int = 0
    original_length: int | None = None

    def __post_init__(self) -> None:
        refuse_unknown_level(self.level)
        if not 1 <= self.rank <= 8:
            raise MethodError(f"--rank is {self.rank}; it must be from 1 to 8. Larger ones are for `ropecli finetune`.")
        if not 1 <= len(self.methods) <= self.points:
            raise MethodError(f"--points is {self.points} for {len(self.methods)} methods; each needs one at least.")

    def plan(self, checkpoint: Checkpoint, spec: ScalingSpec) -> PatchPlan:
        """The patch by a spec. Raises as make_plan does."""
        return make_plan(checkpoint, spec, original_length=self.original_length)

    def geometry(self, checkpoint: Checkpoint) -> RopeGeometry:
        """Of the layers that a plan scales, before any scaling. Raises PatchError."""
        plan = self.plan(checkpoint, make_spec("none"))
        return plan.ropes[plan.scaled[0]].geometry


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
    of lora; population, iterations: of search. original_length: the true pretraining length, tokens, where config.json
    names another. Raises MethodError.
    """
    schedule = Schedule(steps=steps, batch_size=batch_size, seed=seed)
    evolution = Evolution(population=population, iterations=iterations)
    return Settings(level, tuple(methods), points, rank, schedule, evolution, seed, original_length)


def refuse_request(level: str, methods: Sequence[str], factor: float, source: str) -> None:
    """Raises MethodError and DataError."""
    refuse_unknown_level(level)
    if not methods:
        raise MethodError("--methods names no method; `ropecli methods` shows them all.")
    for method in methods:
        tunable(method)
    check_factor(factor)
    refuse_held_out(source)
    read_texts(source)  # nothing is read yet: that it is there is enough


def refuse_unknown_level(level: str) -> None:
    if level not in LEVELS:
        raise MethodError(f"--level is {level!r}; it must be one of {', '.join(LEVELS)}.{did_you_mean(level, LEVELS)}")


def tunable(method: str) -> ScalingMethod:
    """Raises MethodError for an unknown one, and for one whose constants are no matter of one table of frequencies."""
    known = find_method(method)
    if known.remaps or known.depends_on_length:
        raise MethodError(
            f"{method} cannot be tuned: only methods that give one table of frequencies can, as yarn, ntk, abf or "
            "llama3."
        )
    return known


def refuse_held_out(source: str) -> None:
    if source == DEMO:
        raise DataError("'demo' is the held-out text that eval-ppl measures on; calibrate on 'demo-train'.")
