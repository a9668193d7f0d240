"""Draws how often a key was found, by length and depth: one panel per report, with the percentage in each cell."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ropecli.evaluation.eval_report import RetrievalReport
from ropecli.reporting.cells import pivot
from ropecli.reporting.figures import style
from ropecli.reporting.lines import PPL, Metric, numbered, original_lengths_of
from ropecli.reporting.wording import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUMBERED = 24
"""Maximum columns with numbers in the cells."""


def draw_retrieval(reports: Sequence[RetrievalReport], metric: Metric = PPL) -> "Figure":
    found = [pivot(report) for report in reports]
    columns = min(3, len(reports))
    rows = math.ceil(len(reports) / columns)
    width = min(9.0, max(4.2, 1.4 + 0.55 * max(len(one.lengths) for one in found)))
    height = min(9.0, max(3.0, 1.5 + 0.35 * max(len(one.rows) for one in found)))
    tasks = list(dict.fromkeys(clean(f"{report.task} ({report.mode})") for report in reports))
    names = numbered(
        clean(f"{clean(report.checkpoint, 40)}, {report.label}" + f", {report.task} ({report.mode})" * (len(tasks) > 1))
        for report in reports
    )
    with style.drawing():
        figure = style.new_figure(width * columns + 1.4, height * rows + 0.6)
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        image: Any = None
        for axes, report, name in zip(panels, reports, names, strict=False):
            image = _draw_panel(axes, report)
            axes.set_title(style.wrap(name, int((width - 0.8) * 11)), fontsize=9)
        for axes in panels[len(reports) :]:
            axes.remove()
        figure.colorbar(image, ax=list(panels), label="keys found (%)", shrink=0.8)
        sources = ", ".join(list(dict.fromkeys(clean(report.source) for report in reports))[:3])
        chances = {report.chance for report in reports}
        chance = f", chance {100 * chances.pop():.3g}%" if len(chances) == 1 else ""
        trials = sorted({cell.trials for report in reports for cell in report.cells})
        prompts = f"{trials[0]}" if len(trials) == 1 else f"{trials[0]} to {trials[-1]}"
        dashed = f"dashed: the pretraining length ({' or '.join(map(str, original_lengths_of(reports)))} tokens)"
        style.title(
            figure,
            f"{' and '.join(tasks)}: keys found (%){chance}; data {sources}",
            [f"prompts per cell: {prompts}; depth 0 is the start of the text; {dashed}"],
        )
    return figure


def _draw_panel(axes: "Axes", report: RetrievalReport) -> Any:
    import numpy as np

    pivoted = pivot(report)
    depths, lengths = [name for name, _ in pivoted.rows], pivoted.lengths
    found = np.array([[math.nan if cell is None else 100 * cell.accuracy for cell in row] for _, row in pivoted.rows])
    image = axes.imshow(np.ma.masked_invalid(found), cmap="Greys_r", vmin=0, vmax=100, aspect="auto")
    axes.set_facecolor("#f3e9d2")  # cells without a measurement are not grey
    axes.grid(False)
    axes.spines[:].set_visible(True)
    every = max(1, len(lengths) // _NUMBERED)
    axes.set_xticks(range(0, len(lengths), every), [f"{length}" for length in lengths[::every]], rotation=45)
    axes.set_yticks(range(len(depths)), depths)
    axes.set(xlabel="length (tokens)", ylabel="depth of the key (0 to 1)")
    inside = sum(length <= report.original_max_position_embeddings for length in lengths)
    # visible on white and on black; at the edge if all lengths are on one side
    for look in ({"color": "white", "linewidth": 3}, {"color": "black", "linewidth": 1.2, "linestyle": (0, (4, 3))}):
        axes.axvline(inside - 0.5, **look)  # type: ignore[arg-type]
    if len(lengths) <= _NUMBERED:
        for (row, column), percent in np.ndenumerate(found):
            if not math.isnan(percent):
                ink = "black" if percent > 43 else "white"
                axes.text(column, row, f"{percent:.0f}", ha="center", va="center", color=ink, fontsize=8)
    return image
