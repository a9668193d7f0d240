"""The lines of a table or chart: one per report and distinct baseline, in sets of the same data.

The lines of a set were measured on the same tokens or prompts in the same way, so their differences are paired. A table
or a pair of axes shows one set.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ropecli.evaluation.report import Change, Report
from ropecli.reporting.wording import change_words, measured_by, number, sample_count
from ropecli.table import clean

AS_GOOD = 1e-5
"""Relative difference of equal perplexities; the precision of float32."""
BEST_NOTE = "best, or not worse by the paired 95% interval"


@dataclass(frozen=True)
class Metric:
    """axis: label with the unit. of: the value of a report at a length. best: words for the best value.

    scale: of the value to that of a paired change, which is a ratio if the axis is logarithmic. places: decimals. unit:
    after a value. limits: of values.
    """

    axis: str
    of: Callable[[Report, int], float]
    best: str
    higher: bool = True
    logarithmic: bool = False
    scale: float = 1.0
    places: int = 2
    unit: str = ""
    limits: tuple[float, float] = (-math.inf, math.inf)

    @property
    def axis_label(self) -> str:
        return self.axis + (", logarithmic" if self.logarithmic else "")

    def shown(self, value: float | None) -> str:
        return "–" if value is None else number(value, self.places)

    def changed(self, value: float, change: float) -> float:
        """The value after a paired change."""
        if self.logarithmic:
            return value * (1 + change)
        return min(max(value + self.scale * change, self.limits[0]), self.limits[1])

    def is_worse(self, change: Change) -> bool:
        """Whether the change, with its interval, is one for the worse."""
        assert change.low is not None
        assert change.high is not None
        return change.high < 0 if self.higher else change.low > AS_GOOD

    def change_words(self, change: Change) -> str:
        """In percent, in percentage points, or in the metric's own unit."""
        return change_words(change, places=self.places if self.scale == 1 and not self.logarithmic else None)


PPL = Metric(
    "perplexity (lower is better)",
    lambda report, length: report.cells_at(length)[0].ppl,
    "lowest perplexity",
    higher=False,
    logarithmic=True,
)
SCORE = Metric(
    "score (%, higher is better)",
    lambda report, length: 100 * report.mean(length)[0],
    "highest score",
    scale=100,
    places=1,
    unit="%",
    limits=(0, 100),
)
RECALL = Metric("recall (higher is better)", lambda report, length: report.recall(length).change, "highest recall")
_METRICS = {"perplexity": PPL, "scores": SCORE, "recall": RECALL}


@dataclass(frozen=True)
class Line:
    """name: unique in its set.

    method: the report's label, plus "as shipped" where another line has the same method patched in memory.
    """

    name: str
    method: str
    report: Report

    def at(self, length: int, metric: Metric) -> float | None:
        return metric.of(self.report, length) if length in self.report.lengths else None

    def change_from(self, base: "Line", length: int) -> Change | None:
        """The paired change; None if one of them lacks the length, or they cannot be paired."""
        both = length in self.report.lengths and length in base.report.lengths
        return self.report.change_from(base.report, length) if both and self.report.is_comparable(base.report) else None

    def span(self, base: "Line", length: int, metric: Metric) -> tuple[float, float] | None:
        """The paired 95% interval of the difference from `base`, around the base's value; None if it is unknown."""
        value, change = base.at(length, metric), self.change_from(base, length)
        if self is base or value is None or change is None:
            return None
        if change.low is None or change.high is None or change.low == -1:  # -1: by more than float64 holds
            return None
        return metric.changed(value, change.low), metric.changed(value, change.high)


def sets_of(reports: Iterable[Report]) -> list[list[Line]]:
    """The lines of each set of comparable reports: the first report, then by checkpoint in order of appearance.

    A report that is in several files, as that of a baseline, is one line.
    """
    sets: list[list[Report]] = []
    for report in reports:
        members = next((members for members in sets if all(map(report.is_comparable, members))), None)
        if members is None:
            sets.append([report])
        elif not any(_is_same(report, member) for member in members):
            members.append(report)
    return [_lines(members) for members in sets]


def _is_same(first: Report, second: Report) -> bool:
    keys = [(report.digest, report.label, report.in_memory, report.cells) for report in (first, second)]
    return keys[0] == keys[1]


def _lines(reports: Sequence[Report]) -> list[Line]:
    order = list(dict.fromkeys(report.digest for report in reports))
    reports = [reports[0], *sorted(reports[1:], key=lambda report: order.index(report.digest))]
    patched = {(report.digest, report.label) for report in reports if report.in_memory}
    several = len({report.checkpoint for report in reports}) > 1
    labels = len({report.label for report in reports}) > 1
    methods, names = [], []
    for report in reports:
        shipped = not report.in_memory and (report.digest, report.label) in patched
        methods.append(clean(report.label) + (", as shipped" if shipped else ""))
        parts = [clean(report.checkpoint, 40)] * several + [methods[-1]] * (labels or not several)
        names.append(clean(", ".join(parts)))
    return [Line(*line) for line in zip(numbered(names), methods, reports, strict=True)]


def numbered(names: Iterable[str]) -> list[str]:
    """Append a number to repeated names."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique


def metric_of(lines: Sequence[Line]) -> Metric:
    return _METRICS[lines[0].report.kind]


def lengths_of(lines: Iterable[Line]) -> list[int]:
    return sorted({length for line in lines for length in line.report.lengths})


def leading(lines: Sequence[Line], length: int, metric: Metric) -> list[int]:
    """Indices of the lines with a value at a length, best first."""
    values = {index: value for index, line in enumerate(lines) if (value := line.at(length, metric)) is not None}
    return sorted(values, key=lambda index: values[index], reverse=metric.higher)


def best_of(lines: Sequence[Line], length: int, metric: Metric) -> set[int]:
    """Indices of the best line and of those that are not worse by the paired 95% interval.

    Empty for a single line, and if there is no interval.
    """
    ranked = leading(lines, length, metric)
    changes = [lines[index].change_from(lines[ranked[0]], length) for index in ranked[1:]]
    if not changes or any(change is None or change.low is None for change in changes):
        return set()
    best = {ranked[0]}
    for index, change in zip(ranked[1:], changes, strict=True):
        if change and not metric.is_worse(change):
            best.add(index)
    return best


def data_note(reports: Sequence[Report]) -> str | None:
    """A warning if the reports are of several sets of data, else None."""
    several = len(sets_of(reports)) > 1
    return "different data: the numbers of different tables and panels are not comparable" if several else None


def original_lengths_of(reports: Iterable[Report]) -> list[int]:
    """The pretraining lengths, tokens, ascending."""
    return sorted({report.original_max_position_embeddings for report in reports})


def original_length_marks(reports: Iterable[Report], lengths: Sequence[float]) -> list[int]:
    """The pretraining lengths to mark; a distant mark would squeeze the data."""
    return [length for length in original_lengths_of(reports) if min(lengths) <= 2 * length <= 4 * max(lengths)]


def title_of(lines: Sequence[Line], what: str = "") -> str:
    """Checkpoint, `what`, protocol, data and number of documents of one set."""
    report = lines[0].report
    checkpoints, sources = ({getattr(line.report, key) for line in lines} for key in ("checkpoint", "source"))
    checkpoint = clean(report.checkpoint, 120) if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints"
    source = clean(report.source, 120) if len(sources) == 1 else f"{len(sources)} sources"
    return f"{checkpoint}{what}, {measured_by(report)}, data {source}, {sample_count(report)}"
