"""The settings of a tuning run."""

from dataclasses import dataclass

from ropecli.errors import MethodError, did_you_mean
from ropecli.scaling.registry import find_method
from ropecli.tuning.tune_report import LEVELS, OBJECTIVES


@dataclass(frozen=True)
class TuneSettings:
    """The settings of a tuning run. Raises MethodError.

    level: grid, heads, lora or search. objective: ppl scores the last tokens of documents, longppl the tokens that need
    a long context, needle keys to retrieve. evaluator: for longppl, the checkpoint that finds those tokens.
    methods: methods to search constants of. points: total number of constants to try. short_weight: weight of the loss
    at the pretraining length, relative to that at the target length. targets: tokens scored per document, for ppl;
    None: half the pretraining length. max_documents: maximum number of documents to read; None: enough for scoring and
    all steps. original_length: the true pretraining length, tokens, if config.json states another.

    heads and lora: steps, batch_size (sequences per step), rank (lora), evaluate_every (steps), patience (scores
    without improvement before training stops).

    search: as published (arXiv:2402.13753, section 4 and appendix A), except search_documents, the number of documents
    to score each candidate on for ppl, which is our choice. For needle, mutations and crossovers are all mutations.
    """

    level: str = "heads"
    objective: str = "ppl"
    evaluator: str | None = None
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
                f"--level is {self.level!r}; expected one of {', '.join(LEVELS)}.{did_you_mean(self.level, LEVELS)}"
            )
        if self.objective not in OBJECTIVES:
            raise MethodError(f"--objective is {self.objective!r}; expected one of {', '.join(OBJECTIVES)}.")
        if (self.objective == "longppl") != (self.evaluator is not None):
            raise MethodError(
                "--objective longppl needs --evaluator CHECKPOINT, which finds key tokens; other objectives take none."
            )
        if self.objective == "needle" and self.targets is not None:
            raise MethodError("--targets does not apply to --objective needle, which scores the tokens of the keys.")
        if not self.methods:
            raise MethodError("--methods is empty; `ropecli methods` lists all methods.")
        for method in map(find_method, self.methods):
            if method.remaps or method.depends_on_length:
                raise MethodError(
                    f"{method.name} cannot be tuned; expected a method with one frequency table for all lengths, such "
                    "as yarn, ntk, abf or llama3."
                )
