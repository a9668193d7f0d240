"""The lines of a chart of perplexity reports: one per report and per distinct baseline, with names and a metric.

The metric is perplexity, or bits per byte, which is comparable between tokenizers. Different protocols in one chart
are refused, because their numbers are not comparable.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ropecli.errors import DataError, did_you_mean
from ropecli.evaluation.report import BaseReport, EvalReport
from ropecli.evaluation.results import LengthResult
from ropecli.reporting.wording import clean, number, protocol_name

AS_GOOD = 1 + 1e-5
"""Ratio below which two values count as equal; the precision of float32."""
_MORE_PLACES = 2


@dataclass(frozen=True)
class Metric:
    """name: on the command line. axis: label with the unit. of: the value of a row, or None.

    interval: the row's 95% interval, or None. logarithmic: whether its axis is. places: decimal places.
    """

    name: str
    axis: str
    of: Callable[[LengthResult], float | None]
    interval: Callable[[LengthResult], tuple[float, float] | None]
    logarithmic: bool
    places: int

    @property
    def title(self) -> str:
        return self.axis.partition(" (")[0]

    @property
    def axis_label(self) -> str:
        return self.axis + (", logarithmic" if self.logarithmic else "")

    def shown_among(self, values: Iterable[float | None]) -> Callable[[float], str]:
        """Return a formatter with `places` decimals, or up to two more if distinct values would look equal."""
        known = sorted(value for value in values if value is not None)
        for places in range(self.places, self.places + _MORE_PLACES + 1):
            if not any(
                number(low, places) == number(high, places) for low, high in pairwise(known) if high > low * AS_GOOD
            ):
                break
        return lambda value: number(value, places)


def _ppl_interval(row: LengthResult) -> tuple[float, float] | None:
    return None if row.ppl_low is None or row.ppl_high is None else (row.ppl_low, row.ppl_high)


PPL = Metric("ppl", "perplexity (lower is better)", lambda row: row.ppl, _ppl_interval, True, 2)
# no interval: it would need the bytes of each document, which reports do not contain
BITS_PER_BYTE = Metric(
    "bits-per-byte", "bits per byte (lower is better)", lambda row: row.bits_per_byte, lambda row: None, False, 4
)
METRICS = {metric.name: metric for metric in (PPL, BITS_PER_BYTE)}


def get_metric(name: str) -> Metric:
    """Look up a metric. Raises DataError for an unknown name."""
    if name not in METRICS:
        raise DataError(f"Unknown metric {name!r}. Known: {', '.join(METRICS)}.{did_you_mean(name, METRICS)}")
    return METRICS[name]


@dataclass(frozen=True)
class Line:
    """name: unique among the lines. baseline: whether it is a baseline.

    method: the report's label, plus "as shipped" where another line has the same method patched in memory.
    """

    name: str
    report: EvalReport
    baseline: bool = False
    method: str = ""

    def points(self, metric: Metric) -> list[tuple[int, float]]:
        """(length, value) of the rows that have a value."""
        return [(row.length, value) for row in self.report.rows if (value := metric.of(row)) is not None]

    def at(self, length: int, metric: Metric) -> float | None:
        return next((metric.of(row) for row in self.report.rows if row.length == length), None)


def lines_of(reports: Sequence[EvalReport]) -> list[Line]:
    """One line per report, then one per distinct baseline. Raises DataError for different protocols."""
    protocols = list(dict.fromkeys(report.protocol for report in reports))
    if len(protocols) > 1:
        raise DataError(
            f"The reports use different protocols ({', '.join(map(clean, protocols))}), so their perplexities are not "
            "comparable. Plot the reports of one protocol at a time."
        )
    return named_lines(reports)


def named_lines(reports: Sequence[EvalReport]) -> list[Line]:
    """Like lines_of, also for different protocols."""
    own = [Line("", report) for report in reports]
    lines = _with_methods(own + [Line("", base, baseline=True) for base in _baselines(reports)])
    return [replace(line, name=name) for line, name in zip(lines, _names(lines), strict=True)]


def by_checkpoint(lines: Sequence[Line]) -> list[Line]:
    """Group the lines by checkpoint, in order of first appearance; baselines first."""
    order = {digest: place for place, digest in enumerate(dict.fromkeys(line.report.digest for line in lines))}
    return sorted(lines, key=lambda line: (not line.baseline, order[line.report.digest]))


def refuse_without(lines: Iterable[Line], metric: Metric) -> None:
    """Raise DataError for a line without any value of the metric."""
    for line in lines:
        if not line.points(metric):
            raise DataError(
                f"The report of {line.name} has no {metric.name}: its tokenizer does not report the bytes of each "
                "token. Use --metric ppl."
            )


def data_note(reports: Sequence[EvalReport], metric: Metric) -> str | None:
    """A warning if the reports were not computed on the same tokens, else None."""
    if len({report.fingerprint for report in reports}) == 1:
        return None
    if metric.name == "ppl":
        step = "to compare tokenizers on the same text, use bits per byte (ropecli plot --metric bits-per-byte)"
        known = all(row.bits_per_byte is not None for report in reports for row in report.rows)
        return "different data: the perplexities are not comparable" + (f"; {step}" if known else "")
    return "different data: the lines do not use the same text"


def comparable(report: EvalReport) -> tuple[str, str]:
    """Equal for reports whose perplexities are comparable: same tokens, same protocol."""
    return report.fingerprint, protocol_name(report)


def best_note(reports: Sequence[EvalReport]) -> str:
    """Explains the mark of the best value in a column."""
    several = len({comparable(report) for report in reports}) > 1
    return "best among the same tokens and protocol" if several else "best"


def best_of(reports: Sequence[EvalReport], length: int, metric: Metric) -> set[int]:
    """Indices of the best reports at a length, within each group of two or more comparable reports."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for index, report in enumerate(reports):
        for row in report.rows:
            value = metric.of(row)
            if row.length == length and value is not None:
                values.setdefault(comparable(report), {})[index] = value
    return {
        index
        for group in values.values()
        if len(group) > 1
        for index, value in group.items()
        if value <= min(group.values()) * AS_GOOD
    }


def original_lengths_of(reports: Iterable[BaseReport]) -> list[int]:
    """The pretraining lengths, tokens, ascending."""
    return sorted({report.original_max_position_embeddings for report in reports})


def original_length_marks(reports: Iterable[BaseReport], lengths: Sequence[float]) -> tuple[list[int], list[str]]:
    """(pretraining lengths to mark, notes on the others): a distant mark would squeeze the data."""
    originals = original_lengths_of(reports)
    near = [original for original in originals if min(lengths) <= 2 * original and original <= 2 * max(lengths)]
    notes = [
        f"all lengths are {'within' if original > max(lengths) else 'beyond'} the pretraining length, {original}"
        for original in originals
        if original not in near
    ]
    return near, notes


def title_of(reports: Sequence[EvalReport], what: str = "") -> str:
    """Checkpoint, `what`, protocol and data of the reports, or how many there are."""
    checkpoint = _one_or_count([report.checkpoint for report in reports], "checkpoints")
    protocol = _one_or_count([protocol_name(report) for report in reports], "protocols")
    source = _one_or_count([report.source for report in reports], "sources")
    return f"{checkpoint}{what}, protocol {protocol}, data {source}"


def _one_or_count(names: Sequence[str], what: str) -> str:
    different = set(names)
    return clean(names[0], 120) if len(different) == 1 else f"{len(different)} {what}"


def _baselines(reports: Sequence[EvalReport]) -> list[EvalReport]:
    found: list[EvalReport] = []
    for report in reports:
        base = report.baseline
        if base is not None and not any(_is_the_same(base, other) for other in (*reports, *found)):
            found.append(base)
    return found


def _is_the_same(one: EvalReport, other: EvalReport) -> bool:
    return (one.digest, one.label, *comparable(one)) == (other.digest, other.label, *comparable(other)) and (
        one.rows == other.rows
    )


def _with_methods(lines: Sequence[Line]) -> list[Line]:
    patched = {(line.report.digest, line.report.label) for line in lines if line.report.in_memory}
    methods = []
    for line in lines:
        shipped = not line.report.in_memory and (line.report.digest, line.report.label) in patched
        methods.append(f"{line.report.label}, as shipped" if shipped else line.report.label)
    return [replace(line, method=method) for line, method in zip(lines, methods, strict=True)]


_DIFFERENCES: dict[str, Callable[[Any], str]] = {
    "checkpoint": lambda report: clean(report.checkpoint, 40),
    "label": lambda report: report.label,
    "protocol": protocol_name,
    "data": lambda report: f"data {clean(report.source, 30)} {report.fingerprint[:6]}",
}


def _names(lines: Sequence[Line]) -> list[str]:
    """Name lines by method and factor, plus whatever else differs between them."""
    reports = [line.report for line in lines]
    several = {what: len({of(report) for report in reports}) > 1 for what, of in _DIFFERENCES.items()}
    names = []
    for line in lines:
        parts = [_DIFFERENCES["checkpoint"](line.report)] if several["checkpoint"] else []
        if several["label"] or not several["checkpoint"]:
            parts.append(line.method)
        parts += [_DIFFERENCES[what](line.report) for what in ("protocol", "data") if several[what]]
        names.append(clean(("baseline: " if line.baseline else "") + ", ".join(parts)))
    return numbered(names)


def numbered(names: Iterable[str]) -> list[str]:
    """Append a number to repeated names."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unique.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unique
