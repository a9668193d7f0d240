"""Draws perplexity evaluations: by length, by tokens of context, and many methods side by side."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropecli.errors import DataError
from ropecli.evaluation.report import EvalReport
from ropecli.reporting.figures import style
from ropecli.reporting.lines import (
    PPL,
    Line,
    Metric,
    best_note,
    best_of,
    by_checkpoint,
    data_note,
    lines_of,
    original_length_marks,
    original_lengths_of,
    refuse_without,
    title_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_WHISKERS = 6
"""Maximum lines with whiskers; more would hide each other."""
_FEWEST_POINTS = 3
_MOST_LENGTHS, _MOST_ROWS = 12, 150
"""Limits of a comparison."""
_LONGEST_NAME = 50


def draw_perplexity(reports: Sequence[EvalReport], metric: Metric) -> "Figure":
    """A metric against context length: one line per report with its 95% interval, sorted by the last value."""
    lines = lines_of(reports)
    refuse_without(lines, metric)
    lines.sort(key=lambda line: -line.points(metric)[-1][1])
    ends = [end for line in lines for row in line.report.rows for end in metric.interval(row) or ()]
    whiskers = bool(ends) and len(lines) <= _MAX_WHISKERS
    lengths = sorted({length for line in lines for length, _ in line.points(metric)})
    originals, notes = original_length_marks(reports, lengths)
    with style.drawing():
        figure, (axes,) = style.line_figure([line.name for line in lines])
        for index, line in enumerate(lines):
            look = style.BASELINE_LOOK if line.baseline else style.look(index)
            axes.plot(*zip(*line.points(metric), strict=True), label=line.name, **look)
            if whiskers:
                _draw_whiskers(axes, line, look["color"], 2 ** (0.03 * (index - (len(lines) - 1) / 2)), metric)
        style.length_axis(axes, lengths)
        if metric.logarithmic:
            values = [value for line in lines for _, value in line.points(metric)]
            style.log_axis(axes.yaxis, values + (ends if whiskers else []))
        style.mark_original_lengths(axes, originals)
        axes.set_xlabel("context length (tokens), logarithmic")
        axes.set_ylabel(metric.axis_label)
        style.legend(axes)
        if ends:
            notes.append(
                "whiskers: 95% interval over documents"
                if whiskers
                else f"95% intervals are not drawn for more than {_MAX_WHISKERS} lines; --kind comparison shows them"
            )
        title = title_of(reports, f": {metric.title} by context length")
        style.title(figure, title, [data_note(reports, metric), *notes])
    return figure


def _draw_whiskers(axes: "Axes", line: Line, color: str, aside: float, metric: Metric) -> None:
    """aside: factor on the length, so that the whiskers of several lines do not overlap."""
    for row in line.report.rows:
        if interval := metric.interval(row):
            at = row.length * aside
            axes.plot([at, at], interval, color=color, linewidth=0.9, marker="_", markersize=4, alpha=0.8)


def draw_context(reports: Sequence[EvalReport], metric: Metric = PPL) -> "Figure":
    """Mean loss against the number of tokens before the scored one, at each report's longest length."""
    lines = lines_of(reports)
    for line in lines:
        if len(line.report.rows[-1].by_context) < _FEWEST_POINTS:
            raise DataError(
                f"The report of {line.name} has fewer than {_FEWEST_POINTS} points of loss by context. "
                "Use --kind perplexity."
            )
    # each bucket at the geometric middle of its contexts
    points = [
        [(math.sqrt(one.start * (one.stop - 1)), one.nll) for one in line.report.rows[-1].by_context] for line in lines
    ]
    contexts = [context for own in points for context, _ in own]
    originals, notes = original_length_marks(reports, contexts)
    lengths = sorted({report.rows[-1].length for report in reports})
    with style.drawing():
        figure, (axes,) = style.line_figure([line.name for line in lines])
        for index, (line, own) in enumerate(zip(lines, points, strict=True)):
            look = style.BASELINE_LOOK if line.baseline else style.look(index)
            # offset the markers, so that overlapping lines are visible
            axes.plot(*zip(*own, strict=True), label=line.name, markevery=(index % 3, 3), **look)
        style.length_axis(axes, [2**power for power in range(math.ceil(math.log2(max(contexts))) + 1)])
        style.mark_original_lengths(axes, originals)
        axes.set_xlabel("tokens of context, logarithmic")
        axes.set_ylabel("mean loss (nats per token, lower is better)")
        style.legend(axes)
        read = f"length {lengths[0]} tokens" if len(lengths) == 1 else "at each report's longest length"
        title = title_of(reports, ": loss by tokens of context")
        style.title(figure, title, [read, *notes, data_note(reports, PPL)])
    return figure


def draw_comparison(reports: Sequence[EvalReport], metric: Metric) -> "Figure":
    """One row per line and one panel per length, with a dot at the value; the best dot of each panel is filled."""
    lines = by_checkpoint(lines_of(reports))
    refuse_without(lines, metric)
    lengths = sorted({row.length for line in lines for row in line.report.rows})
    if len(lengths) > _MOST_LENGTHS or len(lines) > _MOST_ROWS:
        raise DataError(
            f"{len(lines)} lines at {len(lengths)} lengths are too many for one plot; the limit is {_MOST_ROWS} lines "
            f"at {_MOST_LENGTHS} lengths. Give fewer, or use --kind perplexity."
        )
    names = [style.wrap(line.name, _LONGEST_NAME) for line in lines]
    widest = max(len(part) for name in names for part in name.split("\n"))
    deepest = max(name.count("\n") + 1 for name in names)
    originals = original_lengths_of(line.report for line in lines)
    with style.drawing():
        figure = style.new_figure(
            max(5.0, 0.6 + 0.075 * widest + 2.1 * len(lengths)), 1.8 + (0.1 + 0.16 * deepest) * len(lines)
        )
        panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axes, length in zip(panels, lengths, strict=True):
            _draw_panel(axes, lines, length, metric)
            beyond = "\nbeyond the pretraining length" if len(originals) == 1 and length > originals[0] else ""
            axes.set_title(f"{length} tokens{beyond}", fontsize=9)
        panels[0].set_yticks(range(len(lines)), names)
        panels[0].set_ylim(len(lines) - 0.5, -0.5)
        bars = any(metric.interval(row) for line in lines for row in line.report.rows)
        words = (
            f"{metric.axis_label}; filled: {best_note(reports)}{'; bars: 95% interval over documents' if bars else ''}"
        )
        differ = f"pretraining lengths differ ({originals[0]} to {originals[-1]} tokens) and are not marked"
        style.title(
            figure,
            title_of(reports, f": {metric.title} by method and length"),
            [words, differ if len(originals) > 1 else None, data_note(reports, metric)],
        )
    return figure


def _draw_panel(axes: "Axes", lines: Sequence[Line], length: int, metric: Metric) -> None:
    best = best_of([line.report for line in lines], length, metric)
    shown = metric.shown_among(line.at(length, metric) for line in lines)
    ends = []
    for place, line in enumerate(lines):
        row = next((row for row in line.report.rows if row.length == length), None)
        value = None if row is None else metric.of(row)
        if row is None or value is None:
            continue
        interval = metric.interval(row) or (value, value)
        ends += [value, *interval]
        axes.hlines(place, *interval, color="#555555", linewidth=1)
        axes.plot([value], [place], "o", color="#0072B2", markerfacecolor="#0072B2" if place in best else "white")
        weight = "bold" if place in best else "normal"
        words = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5, "fontweight": weight}
        axes.annotate(shown(value), (max(*interval, value), place), **words)  # type: ignore[arg-type]
    # room for the labels right of the dots
    if metric.logarithmic and ends:
        style.log_axis(axes.xaxis, ends, most=5, room=0.5)
    else:
        axes.margins(x=0.2)
        axes.locator_params(axis="x", nbins=4)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", length=0)
    for place in range(1, len(lines)):
        if lines[place].report.digest != lines[place - 1].report.digest:
            axes.axhline(place - 0.5, color=style.GREY, linewidth=0.8)
