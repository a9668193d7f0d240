"""The report of a measurement, stored as JSON: everything that a table or figure needs."""

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval, Len
from pydantic import TypeAdapter

from ropecli.atomic import new_file
from ropecli.checkpoint.identity import Identity
from ropecli.errors import RopecliError
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
    wilson,
)
from ropecli.hashing import digest
from ropecli.scaling.spec import label_of
from ropecli.version import VERSION

SCHEMA_VERSION = 5
"""Schema of all files of reports. Others are refused."""
ARMS = ("absent", "far", "near")
"""The tasks of the cells of recall, see evaluation/tasks/recall.py."""


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
    text repeats (evaluation/copies.py). Of recall: mean loss by the distance, and the pass of each document if a pass
    has several. Of a score: chance, the mean score of guessing; thoughts, the answers in which one stands (<think>), or
    the thoughts that were cut, if thoughts were asked for.
    """

    task: str
    length: TokenCount
    sums: Annotated[tuple[float, ...], Len(1, 10_000_000)]
    weights: tuple[Amount, ...]
    low: Annotated[float, Interval(ge=0)] | None = None
    high: Annotated[float, Interval(ge=0)] | None = None
    depth: Fraction | None = None
    chance: Fraction | None = None
    thoughts: Count = 0
    tokens: Count = 0
    bits_per_byte: Amount | None = None
    by_distance: tuple[Bucket, ...] = ()
    passes: tuple[Count, ...] = ()
    by_class: tuple["Cell", ...] = ()

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
def loss_difference(cell: Cell, other: Cell, weights: tuple[float, ...]) -> Change:
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
            *(loss_difference(other, each, each.weights), each.weights),
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
        return loss_difference(self.absent, far, self.gains)


@dataclass(frozen=True)
class Report:
    """One task, measured on one checkpoint with one scaling.

    task: the protocol of a perplexity; recall, needle or ruler. weights, scaling: see Identity. method, factor, params:
    the scaling in effect. in_memory: whether the model was patched in memory. original_max_position_embeddings: the
    pretraining length, tokens. source: the data. command: the command line, as a list of arguments. settings: of the
    task and of the passes. fingerprint: sha256 of the token ids of all samples. context_length: tokens that it reads.
    too_short: documents skipped. documents: a digest of each document of the cells, in order; empty of scores.
    reference: of recall.

    Each kind of measurement is a class of its own, see kinds.py. order: which decides first. higher: whether that is
    better. logarithmic: on an axis; then a change is a ratio. scale: of the value to that of changes. places: decimals.
    unit: after a value. change_unit: of a change in words. by_row: whether its cells at a length are depths or tasks.
    samples_are: what one is called. note: below tables.
    """

    kind = ""
    order = 0
    higher, logarithmic, scale = True, False, 1.0
    unit, change_unit, places = "", "", 2
    by_row = False
    samples_are, note = "document", ""

    task: str
    checkpoint: str
    weights: str
    scaling: str
    method: str
    factor: Annotated[float, Interval(gt=0, le=1e12)]
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

    def cells_at(self, length: int) -> list[Cell]:
        return [cell for cell in self.cells if cell.length == length]

    def is_comparable(self, other: "Report") -> bool:
        """Whether both scored the same tokens or prompts in the same way. Recall needs one near arm for all."""
        settings = ("mode", "stride", "targets", "passages_per_pass", "near")
        keys = [(one.task, one.fingerprint, one.reference, *map(one.settings.get, settings)) for one in (self, other)]
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

    @property
    def title(self) -> str:
        return self.kind

    @property
    def measured_by(self) -> str:
        """The protocol, what is repeated, or the way that answers were found."""
        raise NotImplementedError

    @property
    def meaning(self) -> str:
        """What its values stand for, if they refer to another measurement."""
        return ""

    def value(self, length: int) -> float:
        raise NotImplementedError

    def samples(self, length: int) -> int:
        """Documents or prompts."""
        return self.cells_at(length)[0].samples

    @property
    def all_samples(self) -> int:
        return max(cell.samples for cell in self.cells)

    def change_from(self, base: Any, length: int) -> Change:
        """The paired change from another report of the same samples. Raises RopecliError if they differ."""
        raise NotImplementedError

    def change_at(self, base: "Report", length: int) -> Change | None:
        """The paired change from a comparable report at a length, or from its longest one if it lacks this.

        The latter only where the same tokens are scored at every length; else None.
        """
        if length in base.lengths:
            return self.change_from(base, length)
        return loss_change(self.cells_at(length)[0], base.cells[-1]) if self.task in SAME_TOKENS else None

    @property
    def counted(self) -> str:
        """The number of documents or prompts, in words."""
        count = self.all_samples
        return f"{count} {self.samples_are}{'s'[: count != 1]}"

    def plotted(self, change: float) -> float:
        """A paired change on an axis: a ratio, or a difference in the unit of the value."""
        return 1 + change if self.logarithmic else self.scale * change

    def chance(self, length: int) -> float:
        """The value of guessing; 0 if it is unknown."""
        return 0.0

    def words(self, length: int) -> str:
        """The value with its interval."""
        raise NotImplementedError

    def conclusions(self) -> list[str]:
        """Sentences on all lengths."""
        return []

    def as_reference(self) -> Reference | None:
        """What later reports refer to; None if they do not. Raises DataError if it cannot be that."""
        return None

    def columns(self, length: int) -> dict[str, str]:
        """All numbers at a length, by the head of the column."""
        raise NotImplementedError

    def ends(self) -> dict[str, str]:
        """Further columns of a table by length."""
        return {}

    def notes(self, *, alone: bool) -> list[str]:
        """Below a table of all numbers. alone: whether the table has no other report."""
        return []

    def reading(self, length: int, base: "Report | None") -> str:
        """A sentence on what is read at a length. base: to compare with."""
        raise NotImplementedError

    def row(self, length: int) -> dict[str, Any]:
        """value, with its 95% interval low to high, of n documents or prompts; and what belongs to the kind."""
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """What follows from all lengths, for JSON."""
        return {}

    def as_json(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        value = {"kind": self.kind, **asdict(self)}
        value["cells"] = TypeAdapter(list[Cell]).dump_python(self.cells, exclude_defaults=True)
        value["rows"] = [{"length": length, **self.row(length)} for length in self.lengths]
        return value | self.summary()


def write_report(path: Path, value: Any) -> None:
    """Write JSON atomically. Raises OSError."""
    with new_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
