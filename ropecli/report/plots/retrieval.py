"""How often a key was found, by length and depth: a panel a report, grey, with the number in each cell."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError
from ropecli.evaluate.report import RetrievalReport
from ropecli.report.lines import numbered
from ropecli.report.plots import style
from ropecli.report.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_SIDE = 200
MOST_PANELS = 60
_NUMBERED = 24
"""Columns; the cells of more are too narrow for numbers."""


def plot_retrieval(reports: Sequence[RetrievalReport], path: Path) -> None:
    """Raises OutputError, and DataError for more than can be drawn."""
    style.refuse_unknown_kind(path)
    style.save(draw_retrieval(reports), path)


def draw_retrieval(reports: Sequence[RetrievalReport]) -> "Figure":
    import numpy as np

    sides = [(_depths(report), _lengths(report)) for report in reports]
    if not reports or len(reports) > MOST_PANELS or max(len(side) for pair in sides for side in pair) > _MOST_SIDE:
        raise DataError(
            f"A plot holds 1 to {MOST_PANELS} retrieval reports of up to {_MOST_SIDE} lengths and depths. Give others."
        )
    columns = min(3, len(reports))
    rows = math.ceil(len(reports) / columns)
    width = min(9.0, max(4.2 if columns > 1 else 5.6, 1.4 + 0.55 * max(len(lengths) for _, lengths in sides)))
    height = min(9.0, max(3.0, 1.5 + 0.35 * max(len(depths) for depths, _ in sides)))
    with style.drawing():
        figure = style.new_figure(width * columns + 0.8, height * rows + 0.6)
        panels = np.atleast_1d(figure.subplots(rows, columns, squeeze=False)).ravel()
        image: Any = None
        for axes, report, name, (depths, lengths) in zip(panels, reports, panel_names(reports), sides, strict=False):
            image = _draw(axes, report, depths, lengths)
            axes.set_title(name, fontsize=9)
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
    missing = any(len(report.cells) < len(_depths(report)) * len(_lengths(report)) for report in reports)
    return (
        f"{trials} prompts a cell; dashed: the pretraining window, right of it what is beyond; depth 0 is the beginning"
        + ("; cells without a number were not measured" if missing else "")
    )


def _draw(axes: "Axes", report: RetrievalReport, depths: list[float], lengths: list[int]) -> Any:
    import numpy as np

    found = np.full((len(depths), len(lengths)), np.nan)
    for cell in report.cells:
        found[depths.index(cell.depth), lengths.index(cell.length)] = 100 * cell.accuracy
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
    axes.set_yticks(range(len(depths)), [f"{depth:.2g}" for depth in depths])
    axes.set_xlabel("length (tokens)")
    inside = sum(length <= report.original_max_position_embeddings for length in lengths)
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


def _depths(report: RetrievalReport) -> list[float]:
    return sorted({cell.depth for cell in report.cells})


def _lengths(report: RetrievalReport) -> list[int]:
    return sorted({cell.length for cell in report.cells})
