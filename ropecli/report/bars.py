"""A comparison for the terminal: a row a line, a column a length, a bar beside each number, logarithmic for perplexity.

Bars are as long as the value lies above the column's best: the best has the shortest.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ropecli.evaluate.report import EvalReport
from ropecli.report.lines import Line, best_of, by_checkpoint, data_note, lines_of, refuse_without, title_of
from ropecli.report.metrics import Metric

_LONGEST = 10
_SHORTEST = 3


class ComparisonBars:
    """Raises DataError for mixed protocols, and for a report without the metric."""

    def __init__(self, reports: Sequence[EvalReport], metric: Metric) -> None:
        self.reports, self.metric = reports, metric
        self.lines = by_checkpoint(lines_of(reports))
        refuse_without(self.lines, metric)
        self.lengths = sorted({row.length for line in self.lines for row in line.report.rows})

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        names = max(len(line.name) for line in self.lines)
        room = (options.max_width - min(names, 40)) // len(self.lengths) - 13
        longest = max(_SHORTEST, min(_LONGEST, room))
        columns = {length: self._column(length, longest, options.ascii_only) for length in self.lengths}
        yield Text(title_of(self.reports), "bold")
        scale = "a logarithmic bar" if self.metric.logarithmic else "a bar"
        yield Text(f"{self.metric.axis} by length, {scale} from each column's best to its worst; bold: the best")
        table = self._table(columns)
        if Measurement.get(console, options.update(max_width=10**4), table).maximum <= options.max_width:
            yield table
        else:
            yield from (self._table({length: column}) for length, column in columns.items())
        note = data_note(self.reports, self.metric)
        if note:
            yield Text(note)

    def _table(self, columns: Mapping[int, Sequence[Text]]) -> Table:
        """Of some of the lengths, since a narrow terminal has no room for all side by side."""
        table = Table()
        table.add_column("", overflow="fold")
        for length in columns:
            table.add_column(f"{length}", overflow="fold")
        for index, line in enumerate(self.lines):
            if index and line.report.digest != self.lines[index - 1].report.digest:
                table.add_section()
            table.add_row(Text(line.name), *(column[index] for column in columns.values()))
        return table

    def _column(self, length: int, longest: int, ascii_only: bool) -> list[Text]:
        values = [_value(line, length, self.metric) for line in self.lines]
        known = [value for value in values if value is not None]
        best = best_of([line.report for line in self.lines], length, self.metric)
        width = max((len(self.metric.shown(value)) for value in known), default=0)
        cells = []
        for index, value in enumerate(values):
            if value is None:
                cells.append(Text("–".rjust(width)))
                continue
            bar = _bar(longest * _share(value, min(known), max(known), self.metric), ascii_only)
            number = self.metric.shown(value).rjust(width)
            cells.append(Text.assemble((number, "bold" if index in best else ""), " ", (bar, "cyan")))
        return cells


def _bar(columns: float, ascii_only: bool) -> str:
    """Never empty; as fine as an eighth of a column where there are letters for that."""
    if ascii_only:
        return "#" * max(1, round(columns))
    whole, eighths = divmod(max(1, round(8 * columns)), 8)
    return "█" * whole + ("", *"▏▎▍▌▋▊▉")[eighths]


def _value(line: Line, length: int, metric: Metric) -> float | None:
    return next((metric.of(row) for row in line.report.rows if row.length == length), None)


def _share(value: float, low: float, high: float, metric: Metric) -> float:
    if high <= low:
        return 0.0
    if metric.logarithmic:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)
