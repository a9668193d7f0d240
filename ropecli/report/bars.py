"""A comparison for the terminal: a row a line, a column a length, a bar beside each number, logarithmic for perplexity.

Bars are as long as the value lies above the column's best: the best has the shortest.
"""

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from ropecli.evaluate.report import EvalReport
from ropecli.report.fitting import Fitting, add_names
from ropecli.report.lines import best_note, best_of, by_checkpoint, data_note, lines_of, refuse_without, title_of
from ropecli.report.metrics import Metric
from ropecli.report.ticks import share

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
        cells = [self._column(length, longest, options.ascii_only) for length in self.lengths]
        yield Text(title_of(self.reports), "bold")
        scale = "a logarithmic bar" if self.metric.logarithmic else "a bar"
        best = best_note(self.reports)
        yield Text(f"{self.metric.axis} by length, {scale} from each column's best to its worst; bold: {best}")
        yield Fitting(len(self.lengths), lambda columns, names: self._table(cells, columns, names))
        note = data_note(self.reports, self.metric)
        if note:
            yield Text(note)

    def _table(self, cells: Sequence[Sequence[Text]], columns: Sequence[int], names: int) -> Table:
        table = Table()
        add_names(table, [""], names)
        for column in columns:
            table.add_column(f"{self.lengths[column]}", no_wrap=True)
        for index, line in enumerate(self.lines):
            if index and line.report.digest != self.lines[index - 1].report.digest:
                table.add_section()
            table.add_row(Text(line.name), *(cells[column][index] for column in columns))
        return table

    def _column(self, length: int, longest: int, ascii_only: bool) -> list[Text]:
        values = [line.at(length, self.metric) for line in self.lines]
        known = [value for value in values if value is not None]
        best = best_of([line.report for line in self.lines], length, self.metric)
        shown = self.metric.shown_among(known)
        width = max((len(shown(value)) for value in known), default=0)
        cells = []
        for index, value in enumerate(values):
            if value is None:
                cells.append(Text("–".rjust(width)))
                continue
            bar = _bar(longest * share(value, min(known), max(known), self.metric.logarithmic), ascii_only)
            number = shown(value).rjust(width)
            cells.append(Text.assemble((number, "bold" if index in best else ""), " ", (bar, "cyan")))
        return cells


def _bar(columns: float, ascii_only: bool) -> str:
    """Never empty; as fine as an eighth of a column where there are letters for that."""
    if ascii_only:
        return "#" * max(1, round(columns))
    whole, eighths = divmod(max(1, round(8 * columns)), 8)
    return "█" * whole + ("", *"▏▎▍▌▋▊▉")[eighths]
