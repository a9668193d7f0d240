"""Results as tables for the terminal. Names are shown as they are, but for what would command a terminal."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ropecli.evaluate.report import EvalReport
from ropecli.report.comparison import compare
from ropecli.report.fitting import Fitting, add_names
from ropecli.report.rows import columns_of
from ropecli.report.wording import HEADLINES_NOTE, clean, headline_sentence, protocol_name


def perplexity_table(report: EvalReport) -> Group:
    """A line a length; the baseline beside it, and below what follows from the two."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    title = f"{clean(report.checkpoint)}{patched}: perplexity by length, protocol {protocol_name(report)}, "
    title += f"data {clean(report.source)}"
    length, *rest = columns_of(report)

    def table(columns: Sequence[int], names: int) -> Table:
        table = Table()
        shown = [length, *(rest[column] for column in columns)]
        for column in shown:
            table.add_column(column.name, justify="right", no_wrap=True)
        for row in report.rows:
            table.add_row(*(Text(column.of(row)) for column in shown))
        return table

    below = []
    if report.baseline is not None:
        base = report.baseline
        below.append(Text(f"baseline: {clean(base.checkpoint)}, {clean(base.label)}"))
        below += [Text(headline_sentence(headline)) for headline in report.headlines]
        below += [Text(HEADLINES_NOTE, "dim")] if report.headlines else []
    return Group(Text(title), Fitting(len(rest), table), *below)


def comparison_table(reports: Sequence[EvalReport]) -> Group:
    """A line a method, a column a length; bold: the best of each column, among those of the same tokens and protocol.

    Lines say their checkpoint, protocol and data where these are not the same for all.
    """
    comparison = compare(reports)

    def table(columns: Sequence[int], names: int) -> Table:
        table = Table()
        add_names(table, comparison.heads, names)
        for column in columns:
            table.add_column(f"{comparison.lengths[column]}", justify="right", no_wrap=True)
        for line in comparison.lines:
            if line.section:
                table.add_section()
            cells = [Text(number, "bold" if best else "") for number, best in (line.cells[at] for at in columns)]
            table.add_row(*map(Text, line.names), *cells)
        return table

    fitting = Fitting(len(comparison.lengths), table)
    return Group(Text(comparison.title), fitting, *map(Text, comparison.notes))
