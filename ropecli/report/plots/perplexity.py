"""A metric against context length: one line a report, its 95% interval, and the pretraining window."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.evaluate.report import EvalReport
from ropecli.report.lines import Line, data_note, lines_of, refuse_without, title_of, windows_of
from ropecli.report.metrics import METRICS, Metric
from ropecli.report.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CLEAR = 6
"""Lines; the whiskers of more are drawn pale."""


def plot_perplexity(
    reports: Sequence[EvalReport], path: Path, original_window: int | None = None, metric: str = "ppl"
) -> None:
    """original_window: marked instead of the reports' own, tokens.

    Raises OutputError, and DataError for mixed protocols.
    """
    style.refuse_unknown_kind(path)
    style.save(draw_perplexity(reports, METRICS[metric], original_window), path)


def draw_perplexity(reports: Sequence[EvalReport], metric: Metric, original_window: int | None = None) -> "Figure":
    lines = lines_of(reports)
    refuse_without(lines, metric)
    with style.drawing():
        figure = style.new_figure(9.5, max(5.0, 1.5 + 0.2 * len(lines)))
        axes = figure.subplots()
        handles = [_draw(axes, line, index, metric, pale=len(lines) > _CLEAR) for index, line in enumerate(lines)]
        points = [point for line in lines for point in line.points(metric)]
        style.length_axis(axes, sorted({length for length, _ in points}))
        ends = [end for line in lines for row in line.report.rows for end in metric.interval(row) or ()]
        if metric.logarithmic:
            style.value_axis(axes, "y", [value for _, value in points] + ends)
        style.mark_windows(axes, [original_window] if original_window else windows_of(reports))
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel(metric.axis)
        # as the lines end, from above
        order = sorted(range(len(lines)), key=lambda index: -lines[index].points(metric)[-1][1])
        marks = [line for line in axes.lines if str(line.get_label()).startswith("pretraining window")]
        style.legend(
            axes,
            [handles[index] for index in order] + marks,
            [lines[index].name for index in order] + [str(mark.get_label()) for mark in marks],
        )
        style.title(
            figure,
            title_of(reports),
            [data_note(reports, metric), "whiskers: 95% interval over documents" if ends else None],
        )
    return figure


def _draw(axes: "Axes", line: Line, index: int, metric: Metric, pale: bool) -> Any:
    look = style.BASELINE_LOOK if line.baseline else style.look(index)
    lengths, values = zip(*line.points(metric), strict=True)
    (drawn,) = axes.plot(lengths, values, label=line.name, **look)
    rows = [row for row in line.report.rows if metric.interval(row)]
    if rows:
        lows, highs = zip(*(metric.interval(row) or (0.0, 0.0) for row in rows), strict=True)
        at = [row.length for row in rows]
        paint = {"color": look["color"], "linewidth": 0.8, "alpha": 0.35 if pale else 0.8}
        axes.vlines(at, lows, highs, **paint)
        axes.scatter([*at, *at], [*lows, *highs], marker="_", s=40, **paint)
    return drawn
