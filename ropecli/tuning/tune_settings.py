"""The settings of a tuning run."""

from dataclasses import dataclass

from ropecli.errors import MethodError, did_you_mean
from ropecli.scaling.method import ScalingMethod
from ropecli.scaling.registry import find_method
from ropecli.tuning.tune_report import LEVELS


@dataclass(frozen=True)
class TuneSettings:
    """level: grid, heads, lora or search. methods: whose constants are searched; points: how many in all.

    short_weight: of a nat at the pretraining length, against one at the target length. targets: tokens scored of each
    document; None: half the pretraining length. max_documents: read at most so many; None: as many as are trained on
    and scored. original_length: the true pretraining length, tokens, where config.json names another.

    Of heads and lora: steps, batch_size (sequences per step), rank (lora), evaluate_every (steps), patience: scores in
    a row that are no better, and end the training.

    Of search, as published (arXiv:2402.13753, section 4 and appendix A): population, iterations, mutations, crossovers,
    parents; documents, read for each candidate, is our choice. Raises MethodError.
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
    population: int = 64
    iterations: int = 40
    mutations: int = 16
    crossovers: int = 16
    parents: int = 32
    documents: int = 4

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise MethodError(
                f"--level is {self.level!r}; it must be one of {', '.join(LEVELS)}.{did_you_mean(self.level, LEVELS)}"
            )
        if not self.methods:
            raise MethodError("--methods names no method; `ropecli methods` shows them all.")
        for method in self.methods:
            _require_tunable(find_method(method))


def _require_tunable(method: ScalingMethod) -> None:
    if method.remaps or method.depends_on_length:
        raise MethodError(
            f"{method.name} cannot be tuned: only methods that give one table of frequencies can, as yarn, ntk, abf or "
            "llama3."
        )
