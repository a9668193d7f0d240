"""The report of a measurement, stored as JSON: everything that a table or figure needs."""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval, Len

from ropecli.atomic import new_file
from ropecli.checkpoint.identity import Identity
from ropecli.errors import DataError, RopecliError
from ropecli.evaluation.protocols import SAME_TOKENS
from ropecli.evaluation.statistics import (
    LARGEST_NLL,
    Amount,
    Bucket,
    Count,
    Fraction,
    TokenCount,
    bootstrap_interval,
    ratio_interval,
    score_difference,
    wilson,
)
from ropecli.hashing import digest
from ropecli.scaling.spec import label_of
from ropecli.version import VERSION

SCHEMA_VERSION = 5
"""Schema of all files of reports. Others are refused."""
PUBLISHED = 0.856
"""RULER's threshold: the score of Llama-2-7B at 4,096 tokens over thirteen tasks (arXiv:2404.06654, section 4)."""
ARMS = ("absent", "far", "near")
"""The tasks of the cells of recall, see evaluation/tasks/recall.py."""
Positive = Annotated[float, Interval(gt=0, le=1e12)]


def environment() -> dict[str, str]:
    import torch
    import transformers

    versions = {"ropecli": VERSION, "torch": torch.__version__, "transformers": transformers.__version__}
    return {**versions, "python": platform.python_version()}


@dataclass(frozen=True)
class Cell:
    """The result of a task at one length, and at one depth of the key (0: start, 1: end).

    sums, weights: shape (samples,), of each document or prompt. Σ sums / Σ weights is the mean loss in nats per token,
    or the mean score, 0 to 1. Cells of reports with the same fingerprint can be paired. low, high: 95% interval of the
    perplexity (None for a single document) or of the score.

    Of a loss: tokens scored, bits per byte of their text (None if its bytes are unknown), cells by class of what the
    text repeats (evaluation/copies.py); wall time of the passes, which may serve other lengths too, tokens read per
    second, peak memory in bytes (of the process on a CPU, of torch on a GPU). Of recall: mean loss by the distance,
    and the pass of each document if a pass has several. Of a score: chance, the mean score of guessing.
    """

    task: str
    length: TokenCount
    sums: Annotated[tuple[float, ...], Len(1, 10_000_000)]
    weights: tuple[Amount, ...]
    low: Annotated[float, Interval(ge=0)] | None = None
    high: Annotated[float, Interval(ge=0)] | None = None
    depth: Fraction | None = None
    chance: Fraction | None = None
    tokens: Count = 0
    bits_per_byte: Amount | None = None
    by_distance: tuple[Bucket, ...] = ()
    passes: tuple[Count, ...] = ()
    by_class: tuple["Cell", ...] = ()
    # cost of the run, not part of the measurement
    seconds: Amount = field(default=0.0, compare=False)
    tokens_per_second: Amount = field(default=0.0, compare=False)
    peak_memory: Count = field(default=0, compare=False)

    @property
    def value(self) -> float:
        """Mean loss in nats, or mean score."""
        return math.fsum(self.sums) / math.fsum(self.weights)

    @property
    def ppl(self) -> float:
        return math.exp(self.value)

    @property
    def samples(self) -> int:
        """Number of documents or prompts."""
        return len(self.sums)

    def of_samples(self, numbers: Sequence[int]) -> "Cell":
        """The loss of some documents alone."""
        sums, weights = (np.array(values)[list(numbers)] for values in (self.sums, self.weights))
        passes = tuple(self.passes[number] for number in numbers) if self.passes else ()
        interval = (None, None) if self.low is None else bootstrap_interval(sums, weights, passes)
        return replace(
            self,
            sums=tuple(sums.tolist()),
            weights=tuple(weights.tolist()),
            low=interval[0],
            high=interval[1],
            tokens=int(weights.sum()),
            bits_per_byte=None,
            by_distance=(),
            passes=passes,
            by_class=tuple(part for cell in self.by_class if sum((part := cell.of_samples(numbers)).weights)),
        )


def score_cell(task: str, length: int, scores: Sequence[float], **statistics: Any) -> Cell:
    """The cell of a task whose samples are scored from 0 to 1, with Wilson's interval."""
    low, high = wilson(math.fsum(scores), len(scores))
    return Cell(task, length, tuple(map(float, scores)), (1.0,) * len(scores), low, high, **statistics)


@dataclass(frozen=True)
class Change:
    """A paired difference with its 95% interval: of perplexities, relative (0.05 is 5% higher); else, absolute.

    low, high: None for a single document.
    """

    change: float
    low: float | None
    high: float | None


@lru_cache(maxsize=4096)  # table, plot and page ask for the same changes
def loss_change(cell: Cell, base: Cell) -> Change:
    """The relative change of perplexity from `base` to `cell`. Raises RopecliError if their tokens differ."""
    if cell.weights != base.weights:
        raise RopecliError("Cannot compare perplexities of different tokens.")
    weights, difference = np.array(cell.weights), np.array(cell.sums) - np.array(base.sums)
    low, high = bootstrap_interval(difference, weights, cell.passes)
    change = math.expm1(min(float(difference.sum() / weights.sum()), LARGEST_NLL))
    return Change(change, None if low is None else low - 1, None if high is None else high - 1)


@lru_cache(maxsize=4096)
def _difference(cell: Cell, other: Cell, weights: tuple[float, ...]) -> Change:
    """Σ (loss of `cell` − loss of `other`) / Σ weights. weights: of each document."""
    sums, each = np.array(cell.sums) - np.array(other.sums), np.array(weights)
    return Change(float(sums.sum() / each.sum()), *ratio_interval(sums, each, cell.passes))


@dataclass(frozen=True)
class Copies:
    """The scored tokens of one class (evaluation/copies.py), read by a model at its longest length.

    share: of all scored tokens. loss, base_loss: mean, nats; of the base at its own length. gain: base_loss − loss.
    tokens: of each document.
    """

    name: str
    share: float
    loss: float
    base_loss: float
    gain: Change
    tokens: tuple[float, ...]


def copies_of(report: "Report", base: "Report") -> list[Copies]:
    """The classes of a perplexity, against the base at its own length; none without both on the same tokens."""
    length, reference = report.lengths[-1], report.settings.get("reference_length") or 0
    known = report.task in SAME_TOKENS and reference in base.lengths and length > reference
    if not known or reference != base.settings.get("reference_length") or not report.is_comparable(base):
        return []
    cell, of_base = report.cells_at(length)[0], base.cells_at(reference)[0]
    classes, of_base_classes = ([(part.task, part.weights) for part in each.by_class] for each in (cell, of_base))
    if classes != of_base_classes:  # a joined report has the classes of its own longest length
        return []
    return [
        Copies(
            *(each.task, each.tokens / cell.tokens, each.value, other.value),
            *(_difference(other, each, each.weights), each.weights),
        )
        for each, other in zip(cell.by_class, of_base.by_class, strict=True)
    ]


@dataclass(frozen=True)
class Reference:
    """The reference of recall: arms of the first subject, at a length within its pretraining length.

    It is the same in every run on the same documents. name: as the user gave it.
    """

    name: str = field(compare=False)
    weights: str
    scaling: str
    absent: Cell = field(compare=False)
    near: Cell = field(compare=False)

    def of_samples(self, numbers: Sequence[int]) -> "Reference":
        return replace(self, absent=self.absent.of_samples(numbers), near=self.near.of_samples(numbers))

    @property
    def gains(self) -> tuple[float, ...]:
        """The near gain of each document, nats."""
        return tuple(absent - near for absent, near in zip(self.absent.sums, self.near.sums, strict=True))

    def recall(self, far: Cell) -> Change:
        """Σ (absent₀ − far) / Σ (absent₀ − near₀), where ₀ is this reference."""
        return _difference(self.absent, far, self.gains)


@dataclass(frozen=True)
class Report:
    """One task, measured on one checkpoint with one scaling.

    kind: perplexity or recall (cells are losses), or scores. task: the protocol of a perplexity; recall, needle or
    ruler. weights, scaling: see Identity. method, factor, params: the scaling in effect. in_memory: whether the model
    was patched in memory. original_max_position_embeddings: the pretraining length, tokens. source: the data.
    command: the command line, as a list of arguments. settings: of the task and of the passes. fingerprint: sha256 of
    the token ids of all samples. context_length: tokens that it reads. too_short: documents skipped. documents: a
    digest of each document of the cells, in order; empty of scores. reference: of recall.
    """

    kind: Literal["perplexity", "recall", "scores"]
    task: str
    checkpoint: str
    weights: str
    scaling: str
    method: str
    factor: Positive
    params: dict[str, Any]
    in_memory: bool
    original_max_position_embeddings: TokenCount
    context_length: TokenCount
    source: str
    dtype: str
    device: str
    command: list[str]
    settings: dict[str, Any]
    fingerprint: str
    cells: Annotated[list[Cell], Len(1, 10_000)]
    too_short: Count = 0
    document_names: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    reference: Reference | None = None
    environment: dict[str, str] = field(default_factory=environment)

    @property
    def identity(self) -> Identity:
        return Identity(self.weights, self.scaling)

    @property
    def label(self) -> str:
        return self.method if self.method == "none" else label_of(self.method, self.factor, self.params)

    @property
    def mode(self) -> str | None:
        """generate or rank, for scores; generate or losses, for recall."""
        return self.settings.get("mode")

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.length for cell in self.cells})

    @property
    def tasks(self) -> list[str]:
        """The tasks of its cells; RULER has several."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    def cells_at(self, length: int) -> list[Cell]:
        return [cell for cell in self.cells if cell.length == length]

    def mean(self, length: int) -> tuple[float, int]:
        """Mean score over tasks and depths at a length, and the number of samples."""
        cells = self.cells_at(length)
        return sum(cell.value for cell in cells) / len(cells), sum(cell.samples for cell in cells)

    def interval(self, length: int) -> tuple[float, float]:
        """Wilson's 95% interval of the mean score."""
        mean, samples = self.mean(length)
        return wilson(mean * samples, samples)

    def chance(self, length: int) -> float:
        """Mean score of guessing at a length; 0 if it is unknown."""
        chances = [cell.chance or 0.0 for cell in self.cells_at(length)]
        return sum(chances) / len(chances)

    def above_chance(self) -> bool:
        """Return whether the score at the shortest length is above that of guessing, by its 95% interval."""
        shortest = self.lengths[0]
        # without a hit, the interval's lower end is only 0 up to rounding
        return self.mean(shortest)[0] > 0 and self.interval(shortest)[0] > self.chance(shortest)

    def is_comparable(self, other: "Report") -> bool:
        """Whether both scored the same tokens or prompts in the same way. Recall needs one near arm for all."""
        settings = ("mode", "stride", "targets", "passages_per_pass", "near")
        keys = [
            (one.kind, one.task, one.fingerprint, one.reference, *map(one.settings.get, settings))
            for one in (self, other)
        ]
        return keys[0] == keys[1] and all(
            [(cell.task, cell.depth, cell.weights) for cell in self.cells_at(length) if cell.task != "near"]
            == [(cell.task, cell.depth, cell.weights) for cell in other.cells_at(length) if cell.task != "near"]
            for length in set(self.lengths) & set(other.lengths)
        )

    def only(self, documents: Sequence[str], reference: Reference | None) -> "Report":
        """The report of these of its documents alone. reference: of the same ones."""
        numbers = [self.documents.index(document) for document in documents]
        return replace(
            self,
            cells=[cell.of_samples(numbers) for cell in self.cells],
            fingerprint=digest(list(documents)),
            document_names=[],
            documents=list(documents),
            reference=reference,
        )

    def change_from(self, base: "Report", length: int) -> Change:
        """The paired change from another report of the same samples. Raises RopecliError if they differ."""
        cells, base_cells = self.cells_at(length), base.cells_at(length)
        if self.kind == "recall":
            return _difference(base.arm("far", length), self.arm("far", length), self._reference.gains)
        if self.kind == "perplexity":
            return loss_change(cells[0], base_cells[0])
        if not self.is_comparable(base):
            raise RopecliError("Cannot compare scores of different prompts.")
        scores, base_scores = (np.concatenate([cell.sums for cell in row]) for row in (cells, base_cells))
        return Change(*score_difference(scores - base_scores))

    @property
    def threshold(self) -> float:
        """Mean score that the effective length requires; by default, a share of the score at the shortest length."""
        given = self.settings.get("threshold")
        return PUBLISHED * self.mean(self.lengths[0])[0] if given is None else float(given)

    @property
    def effective_length(self) -> int | None:
        """Tokens; None if no length reaches the threshold, or the shortest one's score is not above guessing."""
        passed = list(takewhile(lambda length: self.mean(length)[0] >= self.threshold, self.lengths))
        return passed[-1] if passed and self.above_chance() else None

    def arm(self, name: str, length: int) -> Cell:
        """The losses of recall."""
        return next(cell for cell in self.cells_at(length) if cell.task == name)

    @property
    def _reference(self) -> Reference:
        if self.reference is None:
            raise RopecliError(f"The recall of {self.checkpoint} has no reference.")
        return self.reference

    def far_gain(self, length: int) -> Change:
        """absent − far, nats per token."""
        far = self.arm("far", length)
        return _difference(self.arm("absent", length), far, far.weights)

    def recall(self, length: int) -> Change:
        return self._reference.recall(self.arm("far", length))

    def reads_to(self, least: float = 0.0) -> int | None:
        """The longest length, with all shorter ones, where far gain and recall are certain: above 0 and `least`."""

        def reads(length: int) -> bool:
            gain, recall = self.far_gain(length).low, self.recall(length).low
            return gain is not None and recall is not None and gain > 0 and recall > least

        return max(takewhile(reads, self.lengths), default=None)

    def as_json(self) -> dict[str, Any]:
        """The fields, and what follows from them: rows by length, how far recall reads, RULER's effective length."""
        value = asdict(self)
        value["cells"] = [*map(_without_defaults, value["cells"])]
        value["rows"] = [{"length": length, **self._row(length)} for length in self.lengths]
        if self.kind == "recall":
            value |= {"reads_to": self.reads_to(), "reads_to_half": self.reads_to(0.5)}
        if self.task == "ruler":
            value |= {"threshold": self.threshold, "effective_length": self.effective_length}
        return value

    def _row(self, length: int) -> dict[str, Any]:
        """value, with its 95% interval low to high, of n documents or prompts; and what belongs to the kind."""
        if self.kind == "scores":
            mean, samples = self.mean(length)
            low, high = self.interval(length)
            return {"value": mean, "low": low, "high": high, "n": samples, "chance": self.chance(length)}
        cell = self.arm("far", length) if self.kind == "recall" else self.cells_at(length)[0]
        row = {"n": cell.samples, "nll": cell.value, "tokens": cell.tokens}
        if self.kind == "recall":
            recall, gain = self.recall(length), self.far_gain(length)
            of_gain = {"far_gain": gain.change, "far_gain_low": gain.low, "far_gain_high": gain.high}
            return {"value": recall.change, "low": recall.low, "high": recall.high, **row, **of_gain}
        names = ("bits_per_byte", "seconds", "tokens_per_second", "peak_memory")
        return {
            **{"value": cell.ppl, "low": cell.low, "high": cell.high, **row, "ppl": cell.ppl},
            **{"documents": cell.samples, **{name: getattr(cell, name) for name in names}},
        }


def _without_defaults(cell: dict[str, Any]) -> dict[str, Any]:
    defaults = {entry.name: entry.default for entry in fields(Cell)}
    kept = {key: value for key, value in cell.items() if value != defaults[key]}
    return kept | ({"by_class": [*map(_without_defaults, cell["by_class"])]} if cell["by_class"] else {})


@dataclass(frozen=True)
class Headline:
    """A change of perplexity from another report, paired by document: -0.07 is 7% lower.

    length: of the report. base_length: of the other one, for the same target tokens.
    """

    name: str
    length: TokenCount
    base_length: TokenCount
    change: Change


def headlines(report: Report, base: Report) -> list[Headline]:
    """The short-context cost and the long-context gain, as far as the lengths allow.

    Both reports are perplexities of the same documents. The cost compares them at the longest length that both models
    were pretrained to read. The gain compares the report at its longest length beyond it with the other one at the
    longest length that it reads. This requires a protocol that scores the same tokens at every length; of other
    protocols, both are compared at the longest length.
    """
    pretraining_length = min(each.original_max_position_embeddings for each in (report, base))
    lengths = [length for length in base.lengths if length <= base.context_length]

    def headline(name: str, length: int, base_length: int) -> Headline:
        change = loss_change(report.cells_at(length)[0], base.cells_at(base_length)[0])
        return Headline(name, length, base_length, change)

    changes, longest = [], report.lengths[-1]
    inside = [length for length in lengths if length <= pretraining_length and length in report.lengths]
    if inside:
        changes.append(headline("short-context cost", inside[-1], inside[-1]))
    if longest > pretraining_length and report.task not in SAME_TOKENS:
        if longest in base.lengths:
            changes.append(headline("change beyond the pretraining length", longest, longest))
    elif longest > pretraining_length and lengths:
        changes.append(headline("long-context gain", longest, lengths[-1]))
    return changes


def as_json(reports: Sequence[Report]) -> dict[str, Any]:
    """The content of a file of reports. Those of perplexity have their headlines against the first of the same data."""
    values = [report.as_json() for report in reports]
    for value, report in zip(values, reports, strict=True):
        base = next(other for other in reports if report.is_comparable(other))
        if report is not base and report.kind == "perplexity":
            value["headlines"] = [asdict(headline) for headline in headlines(report, base)]
    return {"schema_version": SCHEMA_VERSION, "reports": values}


def reference_of(report: Report, *, certain: bool = True) -> Reference:
    """The reference of recall for this report and the following ones.

    Raises DataError if a near copy gains nothing certain in it, unless `certain` is False.
    """
    [near] = [cell for cell in report.cells if cell.task == "near"]
    name = f"{report.checkpoint}, {report.label}"
    reference = Reference(name, *report.identity, report.arm("absent", near.length), near)
    gain = _difference(reference.absent, near, near.weights)
    if certain and report.mode == "generate" and near.sums == near.weights:  # every token counts as wrong
        raise DataError(
            f"{report.checkpoint} copied nothing, not even a passage nearby. It may answer nothing at all: look at one "
            "answer, and at the server's stop words and limits."
        )
    if certain and (gain.low is None or gain.low <= 0):
        interval = "" if gain.low is None else f" ({gain.low:.2f} to {gain.high:.2f})"
        raise DataError(
            f"{report.checkpoint} gains {gain.change:.2f} nats per token{interval} from a near copy at {near.length} "
            "tokens, which is not certain, so recall has no reference. More documents narrow the interval; the first "
            "checkpoint must copy text within its pretraining length."
        )
    return reference


def write_report(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises OSError."""
    with new_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
