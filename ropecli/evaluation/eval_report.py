"""Reports of evaluations, stored as JSON: everything that a table or figure needs."""

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, Len

from ropecli.atomic import new_file
from ropecli.evaluation.results import Count, Headline, LengthResult, TokenCount, wilson
from ropecli.scaling.spec import label_of
from ropecli.version import VERSION

SCHEMA_VERSION = 2
Factor = Annotated[float, Interval(gt=0, le=1e12)]
Fraction = Annotated[float, Interval(ge=0, le=1)]


def environment() -> dict[str, str]:
    import torch
    import transformers

    versions = {"ropecli": VERSION, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "python": platform.python_version()}


def loading_request(loading: Mapping[str, Any]) -> dict[str, Any]:
    """The settings on which numbers depend besides checkpoint, scaling and data.

    loading: see load_model. Raises CheckpointError.
    """
    from ropecli.live.loading import settle

    dtype, device = settle(loading.get("dtype", "auto"), loading.get("device", "auto"))
    return {
        "dtype": dtype,
        "device": device.partition(":")[0],
        "attn": loading.get("attn", "auto"),
        **weight_settings(loading),
        "versions": environment(),
    }


def weight_settings(loading: Mapping[str, Any]) -> dict[str, Any]:
    """The setting of a report for weights that were quantized while loading."""
    return {"bits": loading["bits"]} if "bits" in loading else {}


@dataclass(frozen=True)
class BaseReport:
    """The fields that all reports share: checkpoint, scaling, data and machine.

    digest: digest of the checkpoint. method, factor, params: the scaling in effect. in_memory: whether the model was
    patched in memory. original_max_position_embeddings: the pretraining length, tokens. source: the data. command: the
    command line, as a list of arguments.
    """

    checkpoint: str
    digest: str
    method: str
    factor: Factor
    params: dict[str, Any]
    in_memory: bool
    original_max_position_embeddings: TokenCount
    source: str
    dtype: str
    device: str
    command: list[str]

    @property
    def label(self) -> str:
        return self.method if self.method == "none" else label_of(self.method, self.factor, self.params)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EvalReport(BaseReport):
    """One model's perplexity by length, with its protocol, data and library versions.

    settings: the protocol's stride and targets, and the options of the passes. fingerprint: sha256 of the token ids.
    too_short: number of documents skipped. baseline: the report of another checkpoint on the same documents. headlines:
    comparisons with the baseline.
    """

    protocol: str
    settings: dict[str, Any]
    fingerprint: str
    too_short: int
    rows: Annotated[list[LengthResult], Len(1, 10_000)]
    document_names: list[str]
    baseline: "EvalReport | None" = None
    headlines: list[Headline] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=environment)
    kind: str = "perplexity"
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class RetrievalCell:
    """The trials at one length and depth. trials: number of prompts. hits: number of correct answers.

    depth: position of the key in the text, 0 (beginning) to 1 (end). found: whether each trial was a hit; trials of two
    reports with the same fingerprint can be paired. margin: log-probability of the true key minus that of the best
    other candidate, mean, nats. rank: rank of the true key among the candidates, mean, 1 is best. margin and rank are
    None in the mode `generate`.
    """

    length: TokenCount
    depth: Fraction
    trials: TokenCount
    hits: Count
    rank: float | None = None
    margin: float | None = None
    found: tuple[bool, ...] = ()

    @property
    def accuracy(self) -> float:
        return self.hits / self.trials


@dataclass(frozen=True)
class RetrievalReport(BaseReport):
    """Accuracy of retrieving a key from a long text. task: passkey or needle. mode: generate or rank.

    settings: needle, question, number of keys and candidates, seed. fingerprint: sha256 of all prompts and true keys.
    chance: accuracy of random guessing.
    """

    task: str
    mode: str
    settings: dict[str, Any]
    fingerprint: str
    chance: Fraction
    cells: Annotated[list[RetrievalCell], Len(1, 10_000)]
    environment: dict[str, str] = field(default_factory=environment)
    kind: str = "retrieval"
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class RulerCell:
    """One task at one length. scores: of each sample, 0 to 1. chance: mean score of guessing in the mode rank."""

    task: str
    length: TokenCount
    scores: Annotated[tuple[Fraction, ...], Len(1, 100_000)]
    chance: Fraction | None = None

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True)
class RulerReport(BaseReport):
    """Scores of RULER's tasks by length. mode: generate or rank. source: the text of the essay.

    threshold: mean score that the effective length requires. relative: whether it follows from the score at the
    shortest length. effective_length: tokens; None if no length reaches it, or if the score at the shortest length is
    not above chance. settings: samples, seed, chat template. fingerprint: sha256 of all prompts.
    """

    mode: str
    settings: dict[str, Any]
    fingerprint: str
    threshold: Fraction
    relative: bool
    effective_length: TokenCount | None
    cells: Annotated[list[RulerCell], Len(1, 10_000)]
    environment: dict[str, str] = field(default_factory=environment)
    kind: str = "ruler"
    schema_version: int = SCHEMA_VERSION

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.length for cell in self.cells})

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(cell.task for cell in self.cells))

    def mean(self, length: int) -> tuple[float, int]:
        """Mean over tasks at a length, and the number of samples."""
        cells = [cell for cell in self.cells if cell.length == length]
        return sum(cell.score for cell in cells) / len(cells), sum(len(cell.scores) for cell in cells)

    def chance(self, length: int) -> float:
        """Mean score of guessing over tasks at a length; 0 in the mode generate."""
        chances = [cell.chance or 0.0 for cell in self.cells if cell.length == length]
        return sum(chances) / len(chances)

    def above_chance(self) -> bool:
        """Return whether the score at the shortest length is above that of guessing, by its 95% interval."""
        mean, samples = self.mean(self.lengths[0])
        # without a hit, the interval's lower end is only 0 up to rounding
        return mean > 0 and wilson(mean * samples, samples)[0] > self.chance(self.lengths[0])


def write_report(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises OutputError."""
    with new_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
