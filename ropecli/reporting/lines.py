"""The lines of a chart of perplexity reports: a line for each report, a baseline once, names, and the metric drawn.

The metric is perplexity, or bits per byte, which is comparable between tokenizers. Refuses lines of different protocols
in one chart: their numbers have different meanings.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ropecli.errors import DataError, did_you_mean
from ropecli.evaluation.eval_report import BaseReport, EvalReport
from ropecli.evaluation.results import LengthResult
from ropecli.reporting.wording import clean, number, protocol_name

AS_GOOD = 1 + 1e-5
"""float32 tells no smaller differences."""
_MORE_PLACES = 2


@dataclass(frozen=True)
class Metric:
    """name: as on the command line. axis: with the unit. of: the value of a row, None where it has none.

    interval: the row's 95% interval, None where it has none. logarithmic: how its axis is drawn. places: after the
    point.
    """

    name: str
    axis: str
    of: Callable[[LengthResult], float | None]
    interval: Callable[[LengthResult], tuple[float, float] | None]
    logarithmic: bool
    places: int

    @property
    def axis_label(self) -> str:
        return self.axis + (", logarithmic" if self.logarithmic else "")

    def shown_among(self, values: Iterable[float | None]) -> Callable[[float], str]:
        """Formats a value with so many places, and up to two more where different values would else look the same."""
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
# no interval: that of perplexity is over tokens, and a document's bytes are not kept
BITS_PER_BYTE = Metric(
    "bits-per-byte", "bits per byte (lower is better)", lambda row: row.bits_per_byte, lambda row: None, False, 4
)
METRICS = {metric.name: metric for metric in (PPL, BITS_PER_BYTE)}


def get_metric(name: str) -> Metric:
    """Raises DataError for an unknown name."""
    if name not in METRICS:
        raise DataError(f"Unknown metric {name!r}. Known: {', '.join(METRICS)}.{did_you_mean(name, METRICS)}")
    return METRICS[name]


@dataclass(frozen=True)
class Line:
    """name: unlike any other line's. baseline: whether it stands for what others are held against.

    method: the report's label, and that it is the checkpoint's own scaling, where another line has the same by a patch.
    """

    name: str
    report: EvalReport
    baseline: bool = False
    method: str = ""

    def points(self, metric: Metric) -> list[tuple[int, float]]:
        """(length, value) of the rows that have one."""
        return [(row.length, value) for row in self.report.rows if (value := metric.of(row)) is not None]

    def at(self, length: int, metric: Metric) -> float | None:
        return next((metric.of(row) for row in self.report.rows if row.length == length), None)


def lines_of(reports: Sequence[EvalReport]) -> list[Line]:
    """A line each, baselines once, after them. Raises DataError for reports of more than one protocol."""
    protocols = list(dict.fromkeys(report.protocol for report in reports))
    if len(protocols) > 1:
        raise DataError(
            f"The reports are of different protocols ({', '.join(map(clean, protocols))}): their perplexities mean "
            "different things and are not drawn together. Give the reports of one protocol at a time."
        )
    return named_lines(reports)


def named_lines(reports: Sequence[EvalReport]) -> list[Line]:
    """As lines_of, of whatever protocols."""
    own = [Line("", report) for report in reports]
    lines = _with_methods(own + [Line("", base, baseline=True) for base in _baselines(reports)])
    return [replace(line, name=name) for line, name in zip(lines, _names(lines), strict=True)]


def by_checkpoint(lines: Sequence[Line]) -> list[Line]:
    """Those of one checkpoint together, checkpoints in the order they first come in; baselines first."""
    order = {digest: place for place, digest in enumerate(dict.fromkeys(line.report.digest for line in lines))}
    return sorted(lines, key=lambda line: (not line.baseline, order[line.report.digest]))


def refuse_without(lines: Iterable[Line], metric: Metric) -> None:
    """Raises DataError for a line that has no point of the metric."""
    for line in lines:
        if not line.points(metric):
            raise DataError(
                f"The report of {line.name} has no {metric.name}: its tokenizer does not tell how many bytes its "
                "tokens stand for. Use --metric ppl."
            )


def data_note(reports: Sequence[EvalReport], metric: Metric) -> str | None:
    """What a reader must know where the reports are not of the same tokens; None where they are."""
    if len({report.fingerprint for report in reports}) == 1:
        return None
    if metric.name == "ppl":
        step = (
            "of one text by different tokenizers, bits per byte may be compared (ropecli plot --metric bits-per-byte)"
        )
        known = all(row.bits_per_byte is not None for report in reports for row in report.rows)
        return "different data: these perplexities are not of the same tokens" + (f"; {step}" if known else "")
    return "different data: the lines are not of the same text"


def comparable(report: EvalReport) -> tuple[str, str]:
    """The same for reports whose perplexities may be compared: of the same tokens, by the same protocol."""
    return report.fingerprint, protocol_name(report)


def best_note(reports: Sequence[EvalReport]) -> str:
    """What the best of a column is the best of."""
    several = len({comparable(report) for report in reports}) > 1
    return "the best among those of the same tokens and protocol" if several else "the best"


def best_of(reports: Sequence[EvalReport], length: int, metric: Metric) -> set[int]:
    """Which reports, by index, are the best at a length among those of the same tokens and protocol; of two or more."""
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
    """(pretraining lengths to mark beside these lengths, notes on the others): a distant one would squeeze the data."""
    originals = original_lengths_of(reports)
    near = [original for original in originals if min(lengths) <= 2 * original and original <= 2 * max(lengths)]
    notes = [
        f"all lengths lie {'inside' if original > max(lengths) else 'beyond'} the window of {original} tokens"
        for original in originals
        if original not in near
    ]
    return near, notes


def title_of(reports: Sequence[EvalReport], what: str = "") -> str:
    """Which checkpoint, `what` of it, by which protocol, on which data; where these are several, how many."""
    checkpoint = _one_or_count([report.checkpoint for report in reports], "checkpoints")
    protocol = _one_or_count([protocol_name(report) for report in reports], "different ones")
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
        methods.append(f"{line.report.label}, as it is" if shipped else line.report.label)
    return [replace(line, method=method) for line, method in zip(lines, methods, strict=True)]


_DIFFERENCES: dict[str, Callable[[Any], str]] = {
    "checkpoint": lambda report: clean(report.checkpoint, 40),
    "label": lambda report: report.label,
    "protocol": protocol_name,
    "data": lambda report: f"data {clean(report.source, 30)} {report.fingerprint[:6]}",
}


def _names(lines: Sequence[Line]) -> list[str]:
    """Method and factor, and before or after them whatever else is not the same for all."""
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
    """The same names, those that come again with a number."""
    seen: dict[str, int] = {}
    unlike = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        unlike.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return unlike
