"""Draws heat maps of scores, one panel per report: by length, and by the depth of the key or by task."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ropecli.evaluation.report import Report
from ropecli.reporting.figures import style
from ropecli.reporting.lines import numbered, original_lengths_of
from ropecli.reporting.report_tables import score_rows
from ropecli.reporting.wording import reading, ruler_sentences, task_name
from ropecli.table import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUMBERED = 24
"""Maximum columns with numbers in the cells."""


def draw_scores(reports: Sequence[Report]) -> "Figure":
    """Scores in percent, and the mean over the rows."""
    tasks = list(dict.fromkeys(f"{task_name(report)}, {reading(report)}" for report in reports))
    names = numbered(
        clean(f"{clean(report.checkpoint, 40)}, {report.label}" + f", {task_name(report)}" * (len(tasks) > 1))
        for report in reports
    )
    rows = [len(report.at(report.lengths[0])) + 1 for report in reports]
    columns = min(3, len(reports))
    lines = math.ceil(len(reports) / columns)
    room = 0.07 * max(len(name) for report in reports for name in score_rows(report)[0])
    width = min(9.0, max(4.2, 1.0 + room + 0.55 * max(len(report.lengths) for report in reports)))
    height = min(9.0, max(3.0, 1.5 + 0.35 * max(rows)))
    sources = ", ".join(list(dict.fromkeys(clean(report.source) for report in reports))[:3])
    samples = sorted({cell.samples for report in reports for cell in report.cells})
    originals = " or ".join(map(str, original_lengths_of(reports)))
    notes = [
        f"{name}: {ruler_sentences(report)[0]}"
        for name, report in zip(names, reports, strict=True)
        if report.task == "ruler"
    ]
    notes.append(
        f"prompts per cell: {', '.join(map(str, samples))}; dashed: the pretraining length ({originals} tokens)"
    )
    with style.drawing():
        figure = style.new_figure(width * columns + 1.4, height * lines + 0.6)
        panels = figure.subplots(lines, columns, squeeze=False).ravel()
        image: Any = None
        for axes, report, name in zip(panels, reports, names, strict=False):
            image = _draw_panel(axes, report)
            axes.set_title(style.wrap(name, int((width - 0.8) * 11)), fontsize=9)
        for axes in panels[len(reports) :]:
            axes.remove()
        figure.colorbar(image, ax=list(panels[: len(reports)]), label="score (%)", shrink=0.8)
        style.title(figure, f"{' and '.join(tasks)}: score (%); data {sources}", notes)
    return figure


def _draw_panel(axes: "Axes", report: Report) -> Any:
    import numpy as np

    names, scores = score_rows(report)
    lengths, means = report.lengths, [report.mean(length)[0] for length in report.lengths]
    percent = 100 * np.array([*scores, means], dtype=float)  # None becomes NaN
    image = axes.imshow(np.ma.masked_invalid(percent), cmap="Greys_r", vmin=0, vmax=100, aspect="auto")
    axes.set_facecolor("#f3e9d2")  # cells without a measurement are not grey
    axes.grid(False)
    axes.spines[:].set_visible(True)
    every = max(1, len(lengths) // _NUMBERED)
    axes.set_xticks(range(0, len(lengths), every), [f"{length}" for length in lengths[::every]], rotation=45)
    axes.set_yticks(range(len(percent)), [*names, "mean"])
    depths = any(cell.depth is not None for cell in report.cells)
    axes.set(xlabel="length (tokens)", ylabel="depth of the key (0: start, 1: end)" if depths else "")
    axes.axhline(len(names) - 0.5, color=style.GREY, linewidth=2)
    inside = sum(length <= report.original_max_position_embeddings for length in lengths)
    # visible on white and on black; at the edge if all lengths are on one side
    for look in ({"color": "white", "linewidth": 3}, {"color": "black", "linewidth": 1.2, "linestyle": (0, (4, 3))}):
        axes.axvline(inside - 0.5, **look)  # type: ignore[arg-type]
    if len(lengths) <= _NUMBERED:
        for (row, column), value in np.ndenumerate(percent):
            if not math.isnan(value):
                ink = "black" if value > 43 else "white"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=8)
    return image
