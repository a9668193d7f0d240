"""Retrieval as tables for the terminal: a heat map by depth and length, and a summary by length.

Every cell of the map holds its number; the shade only repeats it, for terminals that have colours.
"""

from collections.abc import Sequence

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ropecli.evaluate.report import Cell, RetrievalReport
from ropecli.report.fitting import Fitting, numbers_table
from ropecli.report.pivot import length_summary, pivot
from ropecli.report.wording import clean

_NONE, _ALL = (122, 36, 48), (190, 226, 160)
"""Colours (red, green, blue) of no key found and of all: one dark, one light, so that they differ in grey too."""


def retrieval_grid(report: RetrievalReport) -> Group:
    return Group(Text(_title(report)), Text("keys found, percent", "italic"), heat_map(report), length_table(report))


def heat_map(report: RetrievalReport) -> Fitting:
    """Keys found, percent: a line a depth, a column a length."""
    found = pivot(report)

    def table(columns: Sequence[int], names: int) -> Table:
        table = Table()
        table.add_column("depth", justify="right", no_wrap=True)
        for column in columns:
            table.add_column(f"{found.lengths[column]}", justify="center", no_wrap=True)
        for name, cells in found.rows:
            table.add_row(name, *(_shaded(cells[column]) for column in columns))
        return table

    return Fitting(len(found.lengths), table)


def length_table(report: RetrievalReport) -> Fitting:
    """Over all depths."""
    return numbers_table(*length_summary(report))


def _title(report: RetrievalReport) -> str:
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    asked = "ranked among candidates" if report.mode == "rank" else "generated"
    return (
        f"{clean(report.checkpoint)}{patched}: {clean(report.task)}, {asked}, data {clean(report.source)}; "
        f"a guess finds {100 * report.chance:.3g}%, window {report.original_max_position_embeddings}"
    )


def _shaded(cell: Cell | None) -> Text:
    if cell is None:
        return Text("–")
    share = cell.accuracy
    background = [round(low + share * (high - low)) for low, high in zip(_NONE, _ALL, strict=True)]
    ink = "#000000" if share > 0.5 else "#ffffff"  # named colours are the terminal's to choose
    return Text(f" {100 * share:3.0f} ", style=Style(color=ink, bgcolor=f"rgb({','.join(map(str, background))})"))
