"""Many checkpoints, methods and factors: a row each, a panel for each length, a dot at the value.

Rows carry their names beside them, so that 17 methods are as legible as three; the best of each panel is filled.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropecli.errors import DataError
from ropecli.evaluate.report import EvalReport
from ropecli.report.lines import (
    Line,
    best_note,
    best_of,
    by_checkpoint,
    data_note,
    lines_of,
    refuse_without,
    title_of,
    windows_of,
)
from ropecli.report.metrics import Metric
from ropecli.report.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROOM = 0.5
"""For the numbers right of the dots, as a share of the axis."""
_MOST_LENGTHS = 12
_MOST_LINES = 150
_LONGEST_NAME = 50
_WIDE_NUMBERS = 1e5


def draw_comparison(reports: Sequence[EvalReport], metric: Metric) -> "Figure":
    lines = by_checkpoint(lines_of(reports))
    refuse_without(lines, metric)
    lengths = sorted({row.length for line in lines for row in line.report.rows})
    if len(lengths) > _MOST_LENGTHS or len(lines) > _MOST_LINES:
        instead = "Use --kind perplexity" if len(lines) <= style.MOST_LINES else "Give fewer reports"
        raise DataError(
            f"{len(lines)} lines at {len(lengths)} lengths are too many to compare in one plot; at most {_MOST_LINES} "
            f"at {_MOST_LENGTHS} are drawn. {instead}."
        )
    names = [style.wrap(line.name, _LONGEST_NAME) for line in lines]
    with style.drawing():
        deep = max(name.count("\n") + 1 for name in names)
        width = 0.6 + style.widest(names) * 9 * style.LETTER + 2.1 * len(lengths)
        figure = style.new_figure(max(5.0, width), 1.8 + (0.1 + 0.16 * deep) * len(lines))
        panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axes, length in zip(panels, lengths, strict=True):
            _draw(axes, lines, length, metric)
        panels[0].set_yticks(range(len(lines)), names)
        panels[0].set_ylim(len(lines) - 0.5, -0.5)
        for text, line in zip(panels[0].get_yticklabels(), lines, strict=True):
            text.set_parse_math(False)
            text.set_fontstyle("italic" if line.baseline else "normal")
        bars = any(metric.interval(row) for line in lines for row in line.report.rows)
        words = f"{metric.axis_label}; filled: {best_note(reports)}"
        words += "; bars: 95% interval over documents" if bars else ""
        windows = windows_of(line.report for line in lines)
        unmarked = f"the pretraining windows differ ({windows[0]} to {windows[-1]} tokens): no length is marked"
        notes = [words, unmarked if len(windows) > 1 else None, data_note(reports, metric)]
        style.title(figure, title_of(reports), notes)
    return figure


def _draw(axes: "Axes", lines: Sequence[Line], length: int, metric: Metric) -> None:
    best = best_of([line.report for line in lines], length, metric)
    shown = metric.shown_among(line.at(length, metric) for line in lines)
    values = []
    for place, line in enumerate(lines):
        row = next((row for row in line.report.rows if row.length == length), None)
        value = None if row is None else metric.of(row)
        if row is None or value is None:
            continue
        values += [value, *(metric.interval(row) or ())]
        _draw_one(axes, place, value, metric.interval(row), shown(value), place in best)
    windows = windows_of(line.report for line in lines)
    beyond = "\nbeyond the window" if len(windows) == 1 and length > windows[0] else ""
    axes.set_title(f"{length} tokens{beyond}", fontsize=9)
    if metric.logarithmic and values:
        # few where their numbers are wide
        style.value_axis(axes, "x", values, most=5 if max(values) < _WIDE_NUMBERS else 3, room=_ROOM)
    else:
        style.few_ticks(axes, "x", 4)
        low, high = axes.get_xlim()
        axes.set_xlim(low, high + _ROOM * (high - low))
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", length=0)
    for place in range(1, len(lines)):
        if lines[place].report.digest != lines[place - 1].report.digest:
            axes.axhline(place - 0.5, color=style.GREY, linewidth=0.8)


def _draw_one(
    axes: "Axes", place: int, value: float, interval: tuple[float, float] | None, words: str, best: bool
) -> None:
    if interval:
        axes.hlines(place, *interval, color="#555555", linewidth=1)
    axes.plot([value], [place], "o", markersize=6, color="#0072B2", markerfacecolor="#0072B2" if best else "white")
    end = interval[1] if interval else value
    axes.annotate(
        words,
        (max(end, value), place),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=7.5,
        fontweight="bold" if best else "normal",
    )
