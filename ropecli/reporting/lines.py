"""The lines of a table or chart: one per report and distinct baseline, in sets of the same data.

The lines of a set were measured on the same tokens or prompts in the same way, so their differences are paired. A table
or a pair of axes shows one set.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ropecli.errors import shortened
from ropecli.evaluation.report import Change, Report, headlines
from ropecli.reporting.wording import change_words, measured_by, number, sample_count
from ropecli.table import clean

AS_GOOD = 1e-5
"""Relative difference of equal perplexities; the precision of float32."""
BEST_NOTE = "best, or not worse by the paired 95% interval"
HEADLINES_NOTE = "Percentages: change of perplexity, negative is better. In brackets: 95% interval, paired by document."
_FEW = 4
"""Lines of which each has its headlines."""


@dataclass(frozen=True)
class Metric:
    """axis: label with the unit. of: the value of a report at a length. best: words for the best value.

    logarithmic: on an axis; then a paired change is a ratio. scale: of the value to that of other changes. places:
    decimals. unit: after a value. changes: the unit of a change in words. limits: of values.
    """

    axis: str
    of: Callable[[Report, int], float]
    best: str
    higher: bool = True
    logarithmic: bool = False
    scale: float = 1.0
    places: int = 2
    unit: str = ""
    changes: str = ""
    limits: tuple[float, float] = (-math.inf, math.inf)

    def changed(self, value: float, change: float) -> float:
        """The value after a paired change."""
        if self.logarithmic:
            return value * (1 + change)
        return min(max(value + self.scale * change, self.limits[0]), self.limits[1])

    def is_worse(self, change: Change) -> bool | None:
        """Whether the change, with its interval, is one for the worse; None without an interval."""
        if change.low is None or change.high is None:
            return None
        return change.high < 0 if self.higher else change.low > AS_GOOD

    def change_words(self, change: Change) -> str:
        """In percent, in percentage points, or in the metric's own unit."""
        return change_words(change, places=None if self.changes else self.places)


_METRICS = {
    "perplexity": Metric(
        "perplexity (lower is better), logarithmic",
        lambda report, length: report.cells_at(length)[0].ppl,
        "lowest perplexity",
        higher=False,
        logarithmic=True,
        changes=" in percent",
    ),
    "scores": Metric(
        "score (%, higher is better)",
        lambda report, length: 100 * report.mean(length)[0],
        "highest score",
        scale=100,
        places=1,
        unit="%",
        changes=" in percentage points",
        limits=(0, 100),
    ),
    "recall": Metric(
        "recall (higher is better)", lambda report, length: report.recall(length).change, "highest recall"
    ),
}
"""By kind of report."""


@dataclass(frozen=True)
class Line:
    """name: unique in its set.

    method: the report's label, plus "as shipped" where another line has the same method patched in memory.
    """

    name: str
    method: str
    report: Report

    @property
    def metric(self) -> Metric:
        return _METRICS[self.report.kind]

    def at(self, length: int) -> float | None:
        return self.metric.of(self.report, length) if length in self.report.lengths else None

    def shown(self, length: int) -> str:
        """The value as text, or a dash."""
        value = self.at(length)
        return "–" if value is None else number(value, self.metric.places)

    def change_from(self, base: "Line", length: int) -> Change | None:
        """The paired change from a line of the same set; None if one of them lacks the length."""
        both = length in self.report.lengths and length in base.report.lengths
        return self.report.change_from(base.report, length) if both else None

    def span(self, base: "Line", length: int) -> tuple[float, float] | None:
        """The paired 95% interval of the difference from `base`, around the base's value; None if it is unknown."""
        value, change = base.at(length), self.change_from(base, length)
        if self is base or value is None or change is None or change.low is None or change.high is None:
            return None
        low, high = (self.metric.changed(value, end) for end in (change.low, change.high))
        return None if self.metric.logarithmic and low == 0 else (low, high)  # 0: a change of more than float64 holds


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


def lengths_of(lines: Iterable[Line]) -> list[int]:
    return sorted({length for line in lines for length in line.report.lengths})


def _ranked(lines: Sequence[Line], length: int) -> list[int]:
    """Indices of the lines with a value at a length, best first."""
    values = {index: value for index, line in enumerate(lines) if (value := line.at(length)) is not None}
    return sorted(values, key=lambda index: values[index], reverse=lines[0].metric.higher)


def best_of(lines: Sequence[Line], length: int) -> set[int]:
    """Indices of the best line and of those that are not worse by the paired 95% interval.

    Empty for a single line, and if there is no interval.
    """
    ranked = _ranked(lines, length)
    worse = {}
    for index in ranked[1:]:
        change = lines[index].change_from(lines[ranked[0]], length)
        worse[index] = change and lines[0].metric.is_worse(change)
    if not worse or None in worse.values():
        return set()
    return {ranked[0], *(index for index in ranked[1:] if not worse[index])}


def headline_sentences(lines: Sequence[Line]) -> list[str]:
    """Cost and gain of one extended model, or of a few: changes of perplexity against the first line.

    "short-context cost: +1.2% (0.3 to 2.0) at 256 tokens"; negative is lower.
    """
    if lines[0].report.kind != "perplexity" or not 1 < len(lines) <= _FEW:
        return []
    sentences = []
    for line in lines[1:]:
        for headline in headlines(line.report, lines[0].report):
            where = f" at {headline.length} tokens"
            if headline.length != headline.base_length:
                where = f": {headline.length} tokens against the baseline's {headline.base_length}"
            name = f"{line.name}: " if len(lines) > 2 else ""
            sentences.append(f"{name}{headline.name}: {change_words(headline.change, '%')}{where}")
    return sentences


def verdict(lines: Sequence[Line]) -> list[str]:
    """The headlines, and the best line at the longest length of several with whether that is certain.

    Empty for a single line. Two lines with headlines need no more: these tell which is better.
    """
    sentences = headline_sentences(lines)
    lengths = [length for length in lengths_of(lines) if len(_ranked(lines, length)) > 1]
    if not lengths or (len(lines) == 2 and sentences):
        return sentences
    length, metric = lengths[-1], lines[0].metric
    ranked, best = _ranked(lines, length), best_of(lines, length)
    names = [lines[index].name for index in ranked[1:] if index in best]
    if not best:
        certain = "one document gives no interval, so this may be chance"
    elif not names:
        certain = "by the paired 95% intervals, every other is worse"
    elif len(names) == len(ranked) - 1:
        certain = "by the paired 95% intervals, no other is worse"
    else:
        certain = f"by the paired 95% intervals, not worse: {shortened(', '.join(names), 200)}"
    first = lines[ranked[0]]
    value = first.shown(length) + metric.unit
    return [*sentences, f"At {length} tokens, {first.name} has the {metric.best}, {value}; {certain}."]


def data_note(reports: Sequence[Report]) -> str | None:
    """A warning if the reports are of several sets of data, else None."""
    several = len(sets_of(reports)) > 1
    return "different data: the numbers of different tables and panels are not comparable" if several else None


def title_of(reports: Sequence[Report], what: str) -> str:
    """Checkpoint, `what`, protocol, data and number of documents of one set, or of one report."""
    report = reports[0]
    checkpoints, sources = ({getattr(report, key) for report in reports} for key in ("checkpoint", "source"))
    checkpoint = clean(report.checkpoint, 120) if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints"
    if len(reports) == 1 and report.in_memory:
        checkpoint += f", {clean(report.label)} in memory"
    source = clean(report.source, 120) if len(sources) == 1 else f"{len(sources)} sources"
    return f"{checkpoint}{what}, {measured_by(report)}, data {source}, {sample_count(report)}"
