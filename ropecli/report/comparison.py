"""Reports side by side as cells of text: what the terminal's table and the page's table both show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropecli.evaluate.report import EvalReport
from ropecli.report.lines import Line, best_note, best_of, by_checkpoint, data_note, named_lines, title_of
from ropecli.report.metrics import METRICS, Metric
from ropecli.report.wording import clean, protocol_name


@dataclass(frozen=True)
class ComparedLine:
    """names: under the heads. cells: a number for each length, and whether it is the best. section: another checkpoint
    begins.
    """

    names: list[str]
    cells: list[tuple[str, bool]]
    section: bool


@dataclass(frozen=True)
class Comparison:
    """heads: of the columns before the lengths. notes: what a reader must know."""

    title: str
    heads: list[str]
    lengths: list[int]
    lines: list[ComparedLine]
    notes: list[str]


def compare(reports: Sequence[EvalReport]) -> Comparison:
    """A line a report and a baseline, by checkpoint. The best of each column is so among those of the same tokens and
    protocol.
    """
    metric = METRICS["ppl"]
    lines = by_checkpoint(named_lines(reports))
    compared = [line.report for line in lines]
    lengths = sorted({row.length for report in compared for row in report.rows})
    best = {length: best_of(compared, length, metric) for length in lengths}
    heads = _heads(compared)
    several = len({report.digest for report in compared}) > 1
    shown = {length: metric.shown_among(line.at(length, metric) for line in lines) for length in lengths}
    rows = []
    for index, line in enumerate(lines):
        values = dict(line.points(metric))
        rows.append(
            ComparedLine(
                names=[_HEADS[head](line) for head in heads],
                cells=[
                    (shown[length](values[length]) if length in values else "–", index in best[length])
                    for length in lengths
                ],
                section=index > 0 and line.report.digest != compared[index - 1].digest,
            )
        )
    by = "checkpoint, method and length" if several else "method and length"
    return Comparison(title_of(reports, f": perplexity by {by}"), heads, lengths, rows, _notes(compared, metric))


_HEADS: dict[str, Callable[[Line], str]] = {
    "checkpoint": lambda line: clean(line.report.checkpoint, 40),
    "method": lambda line: ("baseline: " if line.baseline else "") + clean(line.method),
    "protocol": lambda line: protocol_name(line.report),
    "data": lambda line: f"{clean(line.report.source, 30)} {clean(line.report.fingerprint[:6])}",
}


def _heads(reports: Sequence[EvalReport]) -> list[str]:
    """The method, and whatever else differs."""
    wanted = {
        "checkpoint": len({report.digest for report in reports}) > 1,
        "method": True,
        "protocol": len({protocol_name(report) for report in reports}) > 1,
        "data": len({report.fingerprint for report in reports}) > 1,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]


def _notes(reports: Sequence[EvalReport], metric: Metric) -> list[str]:
    bold = f"bold: {best_note(reports)}" if len(reports) > 1 else None
    return [note for note in (data_note(reports, metric), bold) if note]
