"""Many checkpoints, methods and factors: a row each, a panel for each length, a dot at the value.

Rows carry their names beside them, so that 17 methods are as legible as three; the best of each panel is filled.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ropecli.errors import DataError
from ropecli.evaluate.report import EvalReport
from ropecli.evaluate.tally import Row
from ropecli.report.lines import Line, best_of, by_checkpoint, data_note, lines_of, refuse_without, title_of
from ropecli.report.metrics import METRICS, Metric
from ropecli.report.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROOM = 0.5
"""For the numbers right of the dots, as a share of the axis."""
MOST_LENGTHS = 12
MOST_LINES = 150


def plot_comparison(reports: Sequence[EvalReport], path: Path, metric: str = "ppl") -> None:
    """Raises OutputError, and DataError for mixed protocols and for more than can be drawn."""
    style.refuse_unknown_kind(path)
    style.save(draw_comparison(reports, METRICS[metric]), path)


def draw_comparison(reports: Sequence[EvalReport], metric: Metric) -> "Figure":
    lines = by_checkpoint(lines_of(reports))
    refuse_without(lines, metric)
    lengths = sorted({row.length for line in lines for row in line.report.rows})
    if len(lengths) > MOST_LENGTHS or len(lines) > MOST_LINES:
        raise DataError(
            f"{len(lines)} lines at {len(lengths)} lengths are too many to compare in one plot; at most {MOST_LINES} "
            f"at {MOST_LENGTHS} are drawn. Use --kind perplexity, or fewer reports."
        )
    with style.drawing():
        figure = style.new_figure(3.0 + 2.1 * len(lengths), 1.7 + 0.26 * len(lines))
        panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axes, length in zip(panels, lengths, strict=True):
            _draw(axes, lines, length, metric)
        panels[0].set_yticks(range(len(lines)), [line.name for line in lines])
        panels[0].set_ylim(len(lines) - 0.5, -0.5)
        for text, line in zip(panels[0].get_yticklabels(), lines, strict=True):
            text.set_parse_math(False)
            text.set_fontstyle("italic" if line.baseline else "normal")
        bars = any(metric.interval(row) for line in lines for row in line.report.rows)
        words = f"{metric.axis}; filled: the best" + ("; bars: 95% interval over documents" if bars else "")
        notes = [words, data_note(reports, metric)]
        style.title(figure, title_of(reports), notes)
    return figure


def _draw(axes: "Axes", lines: Sequence[Line], length: int, metric: Metric) -> None:
    best = best_of([line.report for line in lines], length, metric)
    values = []
    for place, line in enumerate(lines):
        row = next((row for row in line.report.rows if row.length == length), None)
        value = None if row is None else metric.of(row)
        if row is None or value is None:
            continue
        values += [value, *(metric.interval(row) or ())]
        _draw_one(axes, place, row, value, metric, place in best)
    window = {line.report.original_max_position_embeddings for line in lines}
    beyond = " (beyond the window)" if length > max(window) else ""
    axes.set_title(f"{length} tokens{beyond}", fontsize=9)
    if metric.logarithmic and values:
        style.value_axis(axes, "x", values, most=5, room=_ROOM)
    else:
        style.few_ticks(axes, "x", 4)
        low, high = axes.get_xlim()
        axes.set_xlim(low, high + _ROOM * (high - low))
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", length=0)
    for place in range(1, len(lines)):
        if lines[place].report.digest != lines[place - 1].report.digest:
            axes.axhline(place - 0.5, color=style.GREY, linewidth=0.8)


def _draw_one(axes: "Axes", place: int, row: Row, value: float, metric: Metric, best: bool) -> None:
    interval = metric.interval(row)
    if interval:
        axes.hlines(place, *interval, color="#555555", linewidth=1)
    axes.plot([value], [place], "o", markersize=6, color="#0072B2", markerfacecolor="#0072B2" if best else "white")
    end = interval[1] if interval else value
    axes.annotate(
        metric.shown(value),
        (max(end, value), place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        fontweight="bold" if best else "normal",
    )
