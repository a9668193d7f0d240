"""Retrieval as tables for the terminal: a heat map by depth and length, and a summary by length.

Every cell of the map holds its number; the shade only repeats it, for terminals that have colours.
"""

import math

from rich.console import Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ropecli.evaluate.report import Cell, RetrievalReport
from ropecli.report.wording import clean

_NONE, _ALL = (122, 36, 48), (190, 226, 160)
"""Colours (red, green, blue) of no key found and of all: one dark, one light, so that they differ in grey too."""


def retrieval_grid(report: RetrievalReport) -> Group:
    return Group(Text(_title(report)), heat_map(report), length_table(report))


def heat_map(report: RetrievalReport) -> Table:
    """Keys found, percent: a line a depth, a column a length."""
    lengths, depths = ({getattr(cell, axis) for cell in report.cells} for axis in ("length", "depth"))
    cells = {(cell.length, cell.depth): cell for cell in report.cells}
    table = Table(title="keys found, percent", title_justify="left")
    table.add_column("depth", justify="right")
    for length in sorted(lengths):
        table.add_column(f"{length}", justify="center")
    for depth in sorted(depths):
        table.add_row(f"{depth:.3g}", *(_shaded(cells.get((length, depth))) for length in sorted(lengths)))
    return table


def length_table(report: RetrievalReport) -> Table:
    """Over all depths: accuracy with its standard error, and the mean rank and margin where answers were ranked."""
    ranked = report.mode == "rank"
    table = Table()
    for name in ("length", "found", "± s.e.", "prompts", *(("rank", "margin (nats)") if ranked else ()), "window"):
        table.add_column(name, justify="right")
    for length in sorted({cell.length for cell in report.cells}):
        cells = [cell for cell in report.cells if cell.length == length]
        trials = sum(cell.trials for cell in cells)
        share = sum(cell.hits for cell in cells) / trials
        # of nothing but hits, or misses, no spread can be told
        error = f"{100 * math.sqrt(share * (1 - share) / trials):.0f}%" if 0 < share < 1 else "–"
        means = [f"{_mean(cells, 'rank'):.1f}", f"{_mean(cells, 'margin'):+.2f}"] if ranked else []
        window = "inside" if length <= report.original_max_position_embeddings else "beyond"
        table.add_row(f"{length}", f"{100 * share:.0f}%", error, f"{trials}", *means, window)
    return table


def _title(report: RetrievalReport) -> str:
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    asked = "ranked among candidates" if report.mode == "rank" else "generated"
    return (
        f"{clean(report.checkpoint)}{patched}: {clean(report.task)}, {asked}, data {clean(report.source)}; "
        f"a guess finds {100 * report.chance:.3g}%, window {report.original_max_position_embeddings}"
    )


def _mean(cells: list[Cell], field: str) -> float:
    """Over the prompts of some cells."""
    values = [(getattr(cell, field), cell.trials) for cell in cells if getattr(cell, field) is not None]
    return sum(value * trials for value, trials in values) / sum(trials for _, trials in values) if values else math.nan


def _shaded(cell: Cell | None) -> Text:
    if cell is None:
        return Text("–")
    share = cell.accuracy
    background = [round(low + share * (high - low)) for low, high in zip(_NONE, _ALL, strict=True)]
    ink = "#000000" if share > 0.5 else "#ffffff"  # named colours are the terminal's to choose
    return Text(f" {100 * share:3.0f} ", style=Style(color=ink, bgcolor=f"rgb({','.join(map(str, background))})"))
