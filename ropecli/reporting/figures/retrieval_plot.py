"""Draws heat maps, one panel per report: keys found by length and depth, scores of RULER by length and task."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropecli.evaluation.report import RetrievalReport, RulerReport
from ropecli.reporting.cells import pivot
from ropecli.reporting.figures import style
from ropecli.reporting.lines import PPL, Metric, numbered, original_lengths_of
from ropecli.reporting.wording import clean, ruler_mode, ruler_sentences

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUMBERED = 24
"""Maximum columns with numbers in the cells."""


@dataclass(frozen=True)
class _Grid:
    """percent: shape (rows, lengths), NaN where nothing was measured."""

    name: str
    rows: list[str]
    lengths: list[int]
    percent: "np.ndarray"
    original_length: int


def draw_retrieval(reports: Sequence[RetrievalReport], metric: Metric = PPL) -> "Figure":
    tasks = list(dict.fromkeys(clean(f"{report.task} ({report.mode})") for report in reports))
    names = numbered(
        clean(f"{clean(report.checkpoint, 40)}, {report.label}" + f", {report.task} ({report.mode})" * (len(tasks) > 1))
        for report in reports
    )
    chances = {report.chance for report in reports}
    chance = f", chance {100 * chances.pop():.3g}%" if len(chances) == 1 else ""
    trials = sorted({cell.trials for report in reports for cell in report.cells})
    prompts = f"{trials[0]}" if len(trials) == 1 else f"{trials[0]} to {trials[-1]}"
    title = f"{' and '.join(tasks)}: keys found (%){chance}; data {_sources(reports)}"
    note = f"prompts per cell: {prompts}; depth 0 is the start of the text; {_dashed(reports)}"
    grids = [_retrieval_grid(report, name) for report, name in zip(reports, names, strict=True)]
    return _draw(grids, title, [note], "keys found (%)", "depth of the key (0 to 1)")


def draw_ruler(reports: Sequence[RulerReport], metric: Metric = PPL) -> "Figure":
    names = numbered(clean(f"{clean(report.checkpoint, 40)}, {report.label}") for report in reports)
    modes = " and ".join(dict.fromkeys(map(ruler_mode, reports)))
    samples = sorted({len(cell.scores) for report in reports for cell in report.cells})
    notes = [f"{name}: {ruler_sentences(report)[0]}" for report, name in zip(reports, names, strict=True)]
    notes.append(f"samples per cell: {', '.join(map(str, samples))}; {_dashed(reports)}")
    grids = [_ruler_grid(report, name) for report, name in zip(reports, names, strict=True)]
    return _draw(grids, f"RULER: score (%), {modes}; essay {_sources(reports)}", notes, "score (%)", "")


def _retrieval_grid(report: RetrievalReport, name: str) -> _Grid:
    import numpy as np

    found = pivot(report)
    percent = [[math.nan if cell is None else 100 * cell.accuracy for cell in row] for _, row in found.rows]
    depths = [depth for depth, _ in found.rows]
    return _Grid(name, depths, found.lengths, np.array(percent), report.original_max_position_embeddings)


def _ruler_grid(report: RulerReport, name: str) -> _Grid:
    import numpy as np

    found = {(cell.task, cell.length): 100 * cell.score for cell in report.cells}
    percent = [[found.get((task, length), math.nan) for length in report.lengths] for task in report.tasks]
    percent.append([100 * report.mean(length)[0] for length in report.lengths])
    rows = [*map(clean, report.tasks), "mean"]
    return _Grid(name, rows, report.lengths, np.array(percent), report.original_max_position_embeddings)


def _sources(reports: Sequence[RetrievalReport] | Sequence[RulerReport]) -> str:
    return ", ".join(list(dict.fromkeys(clean(report.source) for report in reports))[:3])


def _dashed(reports: Sequence[RetrievalReport] | Sequence[RulerReport]) -> str:
    return f"dashed: the pretraining length ({' or '.join(map(str, original_lengths_of(reports)))} tokens)"


def _draw(grids: Sequence[_Grid], title: str, notes: list[str], measured: str, down: str) -> "Figure":
    columns = min(3, len(grids))
    rows = math.ceil(len(grids) / columns)
    room = 0.07 * max(len(name) for grid in grids for name in grid.rows)  # of the names beside the cells
    width = min(9.0, max(4.2, 1.0 + room + 0.55 * max(len(grid.lengths) for grid in grids)))
    height = min(9.0, max(3.0, 1.5 + 0.35 * max(len(grid.rows) for grid in grids)))
    with style.drawing():
        figure = style.new_figure(width * columns + 1.4, height * rows + 0.6)
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        image: Any = None
        for axes, grid in zip(panels, grids, strict=False):
            image = _draw_panel(axes, grid, down)
            axes.set_title(style.wrap(grid.name, int((width - 0.8) * 11)), fontsize=9)
        for axes in panels[len(grids) :]:
            axes.remove()
        figure.colorbar(image, ax=list(panels), label=measured, shrink=0.8)
        style.title(figure, title, notes)
    return figure


def _draw_panel(axes: "Axes", grid: _Grid, down: str) -> Any:
    import numpy as np

    lengths = grid.lengths
    image = axes.imshow(np.ma.masked_invalid(grid.percent), cmap="Greys_r", vmin=0, vmax=100, aspect="auto")
    axes.set_facecolor("#f3e9d2")  # cells without a measurement are not grey
    axes.grid(False)
    axes.spines[:].set_visible(True)
    every = max(1, len(lengths) // _NUMBERED)
    axes.set_xticks(range(0, len(lengths), every), [f"{length}" for length in lengths[::every]], rotation=45)
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    axes.set(xlabel="length (tokens)", ylabel=down)
    inside = sum(length <= grid.original_length for length in lengths)
    # visible on white and on black; at the edge if all lengths are on one side
    for look in ({"color": "white", "linewidth": 3}, {"color": "black", "linewidth": 1.2, "linestyle": (0, (4, 3))}):
        axes.axvline(inside - 0.5, **look)  # type: ignore[arg-type]
    if len(lengths) <= _NUMBERED:
        for (row, column), percent in np.ndenumerate(grid.percent):
            if not math.isnan(percent):
                ink = "black" if percent > 43 else "white"
                axes.text(column, row, f"{percent:.0f}", ha="center", va="center", color=ink, fontsize=8)
    return image
