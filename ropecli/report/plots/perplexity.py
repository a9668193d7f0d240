"""A metric against context length: one line a report, its 95% interval, and the pretraining window."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ropecli.evaluate.report import EvalReport
from ropecli.report.lines import Line, data_note, lines_of, refuse_without, title_of, window_marks
from ropecli.report.metrics import Metric
from ropecli.report.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_WHISKERS = 6
"""Lines; the whiskers of more would hide each other."""
_APART = 3.0
"""Points from one line's whiskers to the next one's."""


def draw_perplexity(reports: Sequence[EvalReport], metric: Metric) -> "Figure":
    lines = lines_of(reports)
    refuse_without(lines, metric)
    with style.drawing():
        figure, axes = style.line_figure([line.name for line in lines])
        handles = [_draw(axes, line, index, metric) for index, line in enumerate(lines)]
        points = [point for line in lines for point in line.points(metric)]
        ends = [end for line in lines for row in line.report.rows for end in metric.interval(row) or ()]
        whiskers = bool(ends) and len(lines) <= _MOST_WHISKERS
        if whiskers:
            for index, line in enumerate(lines):
                _draw_whiskers(axes, line, handles[index].get_color(), _APART * (index - (len(lines) - 1) / 2), metric)
        lengths = sorted({length for length, _ in points})
        style.length_axis(axes, lengths)
        if metric.logarithmic:
            style.value_axis(axes, "y", [value for _, value in points] + (ends if whiskers else []))
        windows, notes = window_marks(reports, lengths)
        style.mark_windows(axes, windows)
        axes.set_xlabel("context length (tokens), logarithmic")
        axes.set_ylabel(metric.axis_label)
        # as the lines end, from above
        order = sorted(range(len(lines)), key=lambda index: -lines[index].points(metric)[-1][1])
        marks = [line for line in axes.lines if str(line.get_label()).startswith("pretraining window")]
        style.legend(
            axes,
            [handles[index] for index in order] + marks,
            [lines[index].name for index in order] + [str(mark.get_label()) for mark in marks],
        )
        if ends:
            notes.append(
                "whiskers: 95% interval over documents, set apart so that all are seen"
                if whiskers
                else f"95% intervals are left out of more than {_MOST_WHISKERS} lines; a comparison shows them"
            )
        style.title(figure, title_of(reports), [data_note(reports, metric), *notes])
    return figure


def _draw(axes: "Axes", line: Line, index: int, metric: Metric) -> Any:
    look = style.BASELINE_LOOK if line.baseline else style.look(index)
    lengths, values = zip(*line.points(metric), strict=True)
    (drawn,) = axes.plot(lengths, values, label=line.name, **look)
    return drawn


def _draw_whiskers(axes: "Axes", line: Line, color: str, aside: float, metric: Metric) -> None:
    """aside: points to the right."""
    from matplotlib.transforms import ScaledTranslation

    found = [(row.length, interval) for row in line.report.rows if (interval := metric.interval(row))]
    if not found:
        return
    lengths, intervals = zip(*found, strict=True)
    lows, highs = zip(*intervals, strict=True)
    moved = axes.transData + ScaledTranslation(aside / 72, 0, axes.get_figure().dpi_scale_trans)  # type: ignore[union-attr]
    axes.vlines(lengths, lows, highs, color=color, linewidth=0.9, alpha=0.8, transform=moved)
    ends = {"marker": "_", "s": 16, "color": color, "linewidth": 0.9, "alpha": 0.8}
    axes.scatter([*lengths, *lengths], [*lows, *highs], transform=moved, **ends)  # type: ignore[arg-type]
