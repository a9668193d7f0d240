"""How often a key was found, by length and depth: a panel a report, grey, with the number in each cell."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError
from ropecli.evaluate.report import RetrievalReport
from ropecli.report.lines import numbered, windows_of
from ropecli.report.pivot import Pivot, pivot
from ropecli.report.plots import style
from ropecli.report.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_SIDE = 200
MOST_PANELS = 60
_NUMBERED = 24
"""Columns; the cells of more are too narrow for numbers."""


def draw_retrieval(reports: Sequence[RetrievalReport]) -> "Figure":
    import numpy as np

    found = [pivot(report) for report in reports]
    side = max((len(side) for one in found for side in (one.lengths, one.rows)), default=0)
    if not reports or len(reports) > MOST_PANELS or side > _MOST_SIDE:
        raise DataError(
            f"A plot holds 1 to {MOST_PANELS} retrieval reports of up to {_MOST_SIDE} lengths and depths. Give others."
        )
    columns = min(3, len(reports))
    rows = math.ceil(len(reports) / columns)
    width = min(9.0, max(4.2 if columns > 1 else 5.6, 1.4 + 0.55 * max(len(one.lengths) for one in found)))
    height = min(9.0, max(3.0, 1.5 + 0.35 * max(len(one.rows) for one in found)))
    with style.drawing():
        figure = style.new_figure(width * columns + 0.8, height * rows + 0.6)
        panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
        image: Any = None
        for axes, report, name, one in zip(panels, reports, panel_names(reports), found, strict=False):
            image = _draw(axes, one, _inside(report))
            axes.set_title(style.wrap(name, int((width - 0.8) * 11)), fontsize=9)
        for axes in panels[::columns]:
            axes.set_ylabel("depth of the key (0 to 1)")
        for axes in panels[len(reports) :]:
            axes.set_visible(False)
        figure.colorbar(image, ax=list(panels), label="keys found (%)", shrink=0.8)
        style.title(figure, retrieval_title(reports), [_window_note(reports)])
    return figure


def panel_names(reports: Sequence[RetrievalReport]) -> list[str]:
    """Checkpoint and method, and the task where there are several."""
    several = len({(report.task, report.mode) for report in reports}) > 1
    names = []
    for report in reports:
        task = f", {report.task} ({report.mode})" if several else ""
        names.append(clean(f"{clean(report.checkpoint, 40)}, {report.label}{task}"))
    return numbered(names)


def retrieval_title(reports: Sequence[RetrievalReport]) -> str:
    tasks = " and ".join(dict.fromkeys(clean(f"{report.task} ({report.mode})") for report in reports))
    chances = sorted({report.chance for report in reports})
    sources = dict.fromkeys(clean(report.source) for report in reports)
    guess = f", a guess finds {100 * chances[0]:.3g}%" if len(chances) == 1 else ""
    return f"{tasks}: keys found, in percent{guess}; data {', '.join(list(sources)[:3])}"


def _window_note(reports: Sequence[RetrievalReport]) -> str:
    fewest, most = (of(cell.trials for report in reports for cell in report.cells) for of in (min, max))
    trials = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    missing = any(None in cells for report in reports for _, cells in pivot(report).rows)
    dashed = any(0 < _inside(report) < len(pivot(report).lengths) for report in reports)
    where = "inside" if all(map(_inside, reports)) else "inside or beyond" if any(map(_inside, reports)) else "beyond"
    windows = " or ".join(map(str, windows_of(reports)))
    return (
        f"{trials} prompts a cell; depth 0 is the beginning; "
        + ("dashed: the pretraining window, right of it what is beyond" if dashed else "")
        + ("" if dashed else f"all lengths lie {where} the window of {windows} tokens")
        + ("; cells without a number were not measured" if missing else "")
    )


def _draw(axes: "Axes", pivoted: Pivot, inside: int) -> Any:
    """inside: how many of the lengths lie inside the pretraining window."""
    import numpy as np

    depths, lengths = [name for name, _ in pivoted.rows], pivoted.lengths
    found = np.array([[math.nan if cell is None else 100 * cell.accuracy for cell in row] for _, row in pivoted.rows])
    image = axes.imshow(np.ma.masked_invalid(found), cmap="Greys_r", vmin=0, vmax=100, aspect="auto")
    axes.set_facecolor("#f3e9d2")  # what was not measured is no shade of grey
    axes.grid(False)
    axes.spines[:].set_visible(True)
    for place in range(1, len(lengths)):
        axes.axvline(place - 0.5, color=style.GREY, linewidth=0.4)
    for place in range(1, len(depths)):
        axes.axhline(place - 0.5, color=style.GREY, linewidth=0.4)
    every = max(1, len(lengths) // _NUMBERED)
    axes.set_xticks(range(0, len(lengths), every), [f"{length}" for length in lengths[::every]], rotation=45)
    axes.set_yticks(range(len(depths)), depths)
    axes.set_xlabel("length (tokens)")
    if 0 < inside < len(lengths):
        # on white and on black
        axes.axvline(inside - 0.5, color="white", linewidth=3)
        axes.axvline(inside - 0.5, color="black", linewidth=1.2, linestyle=(0, (4, 3)))
    if len(lengths) <= _NUMBERED:
        for (row, column), percent in np.ndenumerate(found):
            if not math.isnan(percent):
                ink = "black" if percent > 43 else "white"
                axes.text(column, row, f"{percent:.0f}", ha="center", va="center", color=ink, fontsize=8)
    return image


def _inside(report: RetrievalReport) -> int:
    """How many lengths lie inside the pretraining window."""
    return sum(length <= report.original_max_position_embeddings for length in {cell.length for cell in report.cells})
