"""A retrieval report by depth and length, and in sum by length: for the terminal, the picture and the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ropecli.evaluate.report import Cell, RetrievalReport
from ropecli.report.wording import told_apart

_Z = 1.959964
"""Of 95%."""


@dataclass(frozen=True)
class Pivot:
    """rows: (depth in words, its cell at each length, None where nothing was measured)."""

    lengths: list[int]
    rows: list[tuple[str, list[Cell | None]]]


def pivot(report: RetrievalReport) -> Pivot:
    lengths = sorted({cell.length for cell in report.cells})
    depths = sorted({cell.depth for cell in report.cells})
    cells = {(cell.length, cell.depth): cell for cell in report.cells}
    names = told_apart(depths, digits=2)
    return Pivot(
        lengths,
        [(name, [cells.get((length, at)) for length in lengths]) for name, at in zip(names, depths, strict=True)],
    )


def length_summary(report: RetrievalReport) -> tuple[list[str], list[list[str]]]:
    """(heads, cells of each length) over all depths; with mean rank and margin where answers were ranked."""
    ranked = report.mode == "rank"
    rows = []
    for length in sorted({cell.length for cell in report.cells}):
        cells = [cell for cell in report.cells if cell.length == length]
        hits, trials = sum(cell.hits for cell in cells), sum(cell.trials for cell in cells)
        low, high = wilson(hits, trials)
        means = [_mean(cells, "rank", ".1f"), _mean(cells, "margin", "+.2f")] if ranked else []
        window = "inside" if length <= report.original_max_position_embeddings else "beyond"
        interval = f"{100 * low:.0f} to {100 * high:.0f}%"
        rows.append([f"{length}", f"{100 * hits / trials:.0f}%", interval, f"{trials}", *means, window])
    heads = ["length", "found", "95% (Wilson)", "prompts"]
    return [*heads, *(("mean rank", "margin (nats)") if ranked else ()), "window"], rows


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """The 95% interval of a share, which has a width also of nothing but hits (Wilson 1927)."""
    share, much = hits / trials, _Z * _Z / trials
    middle = (share + much / 2) / (1 + much)
    half = _Z / (1 + much) * math.sqrt(share * (1 - share) / trials + much / (4 * trials))
    return max(0.0, middle - half), min(1.0, middle + half)


def _mean(cells: Sequence[Cell], field: str, form: str) -> str:
    """Over the prompts of some cells."""
    values = [(getattr(cell, field), cell.trials) for cell in cells if getattr(cell, field) is not None]
    if not values:
        return "–"
    return format(sum(value * trials for value, trials in values) / sum(trials for _, trials in values), form)
