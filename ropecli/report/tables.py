"""Results as tables for the terminal. Names are shown as they are, but for what would command a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ropecli.evaluate.report import EvalReport
from ropecli.report.comparison import compare
from ropecli.report.rows import Column, columns_of
from ropecli.report.wording import HEADLINES_NOTE, clean, headline_sentence, protocol_name


class _Fitting:
    """The first table where the terminal is wide enough for it, the others below each other where it is not."""

    def __init__(self, wide: Table, narrow: Sequence[Table]) -> None:
        self.wide, self.narrow = wide, narrow

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        fits = Measurement.get(console, options.update(max_width=10**4), self.wide).maximum <= options.max_width
        return [self.wide] if fits else list(self.narrow)


def perplexity_table(report: EvalReport) -> Group:
    """A line a length; the baseline beside it, and below what follows from the two."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    title = f"{clean(report.checkpoint)}{patched}: perplexity by length, protocol {protocol_name(report)}, "
    title += f"data {clean(report.source)}"
    columns = columns_of(report)
    results = [column for column in columns if column.result]
    rest = [columns[0], *(column for column in columns if not column.result)]
    table = _Fitting(_table(report, columns), [_table(report, results), _table(report, rest)])
    below = []
    if report.baseline is not None:
        base = report.baseline
        below.append(Text(f"baseline: {clean(base.checkpoint)}, {clean(base.label)}"))
        below += [Text(headline_sentence(headline)) for headline in report.headlines]
        below += [Text(HEADLINES_NOTE, "dim")] if report.headlines else []
    return Group(Text(title), table, *below)


def _table(report: EvalReport, columns: Sequence[Column]) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for row in report.rows:
        table.add_row(*(Text(column.of(row)) for column in columns))
    return table


def comparison_table(reports: Sequence[EvalReport]) -> Group:
    """A line a method, a column a length; bold: the best of each column, among those of the same tokens and protocol.

    Lines say their checkpoint, protocol and data where these are not the same for all.
    """
    comparison = compare(reports)
    table = Table()
    for head in comparison.heads:
        table.add_column(head)
    for length in comparison.lengths:
        table.add_column(f"{length}", justify="right")
    for line in comparison.lines:
        if line.section:
            table.add_section()
        cells = [Text(number, "bold" if best else "") for number, best in line.cells]
        table.add_row(*map(Text, line.names), *cells)
    return Group(Text(comparison.title), table, *map(Text, comparison.notes))
