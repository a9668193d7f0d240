"""Draws evaluations: perplexity by length, many methods side by side, and heat maps of scores."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.errors import DataError, shortened
from ropecli.evaluation.report import Report
from ropecli.reporting.figures import style
from ropecli.reporting.lines import BEST_NOTE, Line, best_of, lengths_of, numbered, sets_of, title_of
from ropecli.reporting.report_files import AnyReport
from ropecli.reporting.report_tables import score_rows
from ropecli.reporting.wording import measured_by, ruler_sentences, task_name
from ropecli.table import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    Part = Figure | SubFigure

_MOST_LINES = 8
"""Maximum reports of a perplexity plot; more are drawn as a comparison unless --kind is given."""
_MAX_WHISKERS = 6
"""Maximum lines with whiskers; more would hide each other."""
_LONGEST_NAME = 50
_PAIRED = "paired 95% interval of the difference from"


def draw_perplexity(reports: Sequence[Report]) -> "Figure":
    """Perplexity against context length: one line per report, sorted by the last value.

    Whiskers: the paired interval of the difference from the first line; of a single line, its interval over documents.
    """
    sets = sets_of(reports)
    return _stacked(sets, [style.line_size([line.name for line in lines]) for lines in sets], _perplexity)


def draw_comparison(reports: Sequence[Report]) -> "Figure":
    """One row per line and one panel per length, with a dot at the value.

    Filled dots: the best line, and those that are not worse. Bars: the paired interval of the difference from the first
    line.
    """
    sets = sets_of(reports)
    columns = max(len(lengths_of(lines)) for lines in sets)
    names = [style.wrap(line.name, _LONGEST_NAME) for lines in sets for line in lines]
    widest = max(len(part) for name in names for part in name.split("\n"))
    row = 0.1 + 0.16 * max(name.count("\n") + 1 for name in names)
    width = max(5.0, 0.6 + 0.075 * widest + 2.3 * columns)
    sizes = [(width, 1.8 + row * len(lines)) for lines in sets]
    return _stacked(sets, sizes, _comparison)


def _stacked(
    sets: Sequence[Sequence[Line]],
    sizes: Sequence[tuple[float, float]],
    draw: "Callable[[Part, Sequence[Line]], None]",
) -> "Figure":
    """One part of the figure for each set. sizes: inches."""
    with style.drawing():
        figure = style.new_figure(max(width for width, _ in sizes), sum(height for _, height in sizes))
        heights = [height for _, height in sizes]
        parts: Sequence[Part] = [figure]
        if len(sets) > 1:
            parts = list(figure.subfigures(len(sets), 1, squeeze=False, height_ratios=heights)[:, 0])
        for part, lines in zip(parts, sets, strict=True):
            draw(part, lines)
    return figure


def _perplexity(figure: "Part", lines: Sequence[Line]) -> None:
    reports, lengths, axes = [line.report for line in lines], lengths_of(lines), figure.subplots()
    spans = {line.name: _spans(line, lines) for line in lines}
    values = [cell.ppl for report in reports for cell in report.cells]
    ends = [end for of_line in spans.values() for span in of_line.values() for end in span]
    whiskers = bool(ends) and len(lines) <= _MAX_WHISKERS
    base = lines[0] if len(lines) > 1 and lines[0].report.method == "none" else None
    for index, line in enumerate(sorted(lines, key=lambda line: -line.report.cells[-1].ppl)):
        look = style.BASELINE_LOOK if line is base else style.look(index)
        axes.plot(line.report.lengths, [cell.ppl for cell in line.report.cells], label=line.name, **look)
        aside = 2 ** (0.03 * (index - (len(lines) - 1) / 2))  # whiskers of several lines do not overlap
        for length, span in spans[line.name].items() if whiskers else ():
            at = [length * aside] * 2
            axes.plot(at, span, color=look["color"], linewidth=0.9, marker="_", markersize=4, alpha=0.8)
    style.length_axis(axes, lengths)
    style.log_axis(axes.yaxis, [*values, *ends * whiskers])
    for length in _original_lengths(reports):
        if lengths[0] <= 2 * length <= 4 * lengths[-1]:  # a distant mark would squeeze the data
            name = f"pretraining length ({length})"
            axes.axvline(length, color=style.GREY, linewidth=1, linestyle=(0, (6, 3)), label=name)
    style.legend(axes)
    axes.set(xlabel="context length (tokens), logarithmic", ylabel=lines[0].metric.axis)
    note = None
    if whiskers:
        note = f"whiskers: {'95% interval over documents' if len(lines) == 1 else f'{_PAIRED} {lines[0].name}'}"
    elif ends:
        note = f"intervals are not drawn for more than {_MAX_WHISKERS} lines; --kind comparison shows them"
    style.title(figure, title_of(reports, ": perplexity by context length"), [note])


def _spans(line: Line, lines: Sequence[Line]) -> dict[int, tuple[float, float]]:
    """Intervals by length: of the difference from the first line; of a single line, over documents."""
    if len(lines) > 1:
        spans = {length: line.span(lines[0], length) for length in line.report.lengths}
        return {length: span for length, span in spans.items() if span}
    cells = line.report.cells
    return {cell.length: (cell.low, cell.high) for cell in cells if cell.low is not None and cell.high is not None}


def _original_lengths(reports: Iterable[Report]) -> list[int]:
    """The pretraining lengths, tokens, ascending."""
    return sorted({report.original_max_position_embeddings for report in reports})


def _comparison(figure: "Part", lines: Sequence[Line]) -> None:
    reports, lengths = [line.report for line in lines], lengths_of(lines)
    originals = _original_lengths(reports)
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    bars = [_draw_panel(axes, lines, length) for axes, length in zip(panels, lengths, strict=True)]
    for axes, length in zip(panels, lengths, strict=True):
        beyond = "\nbeyond the pretraining length" if len(originals) == 1 and length > originals[0] else ""
        axes.set_title(f"{length} tokens{beyond}", fontsize=9)
    panels[0].set_yticks(range(len(lines)), [style.wrap(line.name, _LONGEST_NAME) for line in lines])
    panels[0].set_ylim(len(lines) - 0.5, -0.5)
    words = [lines[0].metric.axis]
    if any(best_of(lines, length) for length in lengths):
        words.append(f"filled: {BEST_NOTE}")
    if any(bars):
        words.append(f"bars: {_PAIRED} {lines[0].name} (dashed)")
    differ = f"pretraining lengths differ ({originals[0]} to {originals[-1]} tokens) and are not marked"
    title = title_of(reports, f": {task_name(reports[0])} by method and length")
    style.title(figure, title, ["; ".join(words), differ if len(originals) > 1 else None])


def _draw_panel(axes: "Axes", lines: Sequence[Line], length: int) -> bool:
    """Returns whether there are bars."""
    best, metric = best_of(lines, length), lines[0].metric
    spans = [line.span(lines[0], length) for line in lines]
    ends = []
    for place, (line, span) in enumerate(zip(lines, spans, strict=True)):
        value = line.at(length)
        if value is None:
            continue
        low, high = span or (value, value)
        ends += [value, low, high]
        axes.hlines(place, low, high, color="#555555", linewidth=1)
        axes.plot([value], [place], "o", color="#0072B2", markerfacecolor="#0072B2" if place in best else "white")
        change = line.change_from(lines[0], length) if place else None
        unit = "%" if metric.logarithmic else ""
        words = line.shown(length) + (f" ({metric.change_words(change).split(' ')[0]}{unit})" if change else "")
        weight = "bold" if place in best else "normal"
        look = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 7.5, "fontweight": weight}
        axes.annotate(words, (max(low, value, high), place), **look)  # type: ignore[arg-type]
    first = lines[0].at(length)
    if any(spans) and first is not None:
        axes.axvline(first, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    # room for the labels right of the dots
    if metric.logarithmic and ends:
        style.log_axis(axes.xaxis, ends, most=5, room=0.65)
    elif ends:
        width = max(0.01, max(ends) - min(ends))
        axes.set_xlim(min(ends) - 0.05 * width, max(ends) + 0.65 * width)
        axes.locator_params(axis="x", nbins=4)
    axes.tick_params(axis="x", labelsize=7.5)
    axes.tick_params(axis="y", length=0)
    for place in range(1, len(lines)):
        if lines[place].report.digest != lines[place - 1].report.digest:
            axes.axhline(place - 0.5, color=style.GREY, linewidth=0.8)
    return any(spans)


def draw_scores(reports: Sequence[Report]) -> "Figure":
    """Scores in percent, and the mean over the rows."""
    tasks = list(dict.fromkeys(f"{task_name(report)}, {measured_by(report)}" for report in reports))
    names = numbered(
        clean(f"{clean(report.checkpoint, 40)}, {report.label}" + f", {task_name(report)}" * (len(tasks) > 1))
        for report in reports
    )
    rows = [len(report.cells_at(report.lengths[0])) + 1 for report in reports]
    columns = min(3, len(reports))
    lines = math.ceil(len(reports) / columns)
    room = 0.07 * max(len(name) for report in reports for name in score_rows(report)[0])
    width = min(9.0, max(4.2, 1.0 + room + 0.55 * max(len(report.lengths) for report in reports)))
    height = min(9.0, max(3.0, 1.5 + 0.35 * max(rows)))
    sources = shortened(", ".join(dict.fromkeys(clean(report.source) for report in reports)), 200)
    samples = sorted({cell.samples for report in reports for cell in report.cells})
    originals = " or ".join(map(str, _original_lengths(reports)))
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
            image = _heat_map(axes, report)
            axes.set_title(style.wrap(name, int((width - 0.8) * 11)), fontsize=9)
        for axes in panels[len(reports) :]:
            axes.remove()
        figure.colorbar(image, ax=list(panels[: len(reports)]), label="score (%)", shrink=0.8)
        style.title(figure, f"{' and '.join(tasks)}: score (%); data {sources}", notes)
    return figure


def _heat_map(axes: "Axes", report: Report) -> Any:
    names, scores = score_rows(report)
    lengths, means = report.lengths, [report.mean(length)[0] for length in report.lengths]
    percent = 100 * np.array([*scores, means], dtype=float)  # None becomes NaN
    image = axes.imshow(np.ma.masked_invalid(percent), cmap="Greys_r", vmin=0, vmax=100, aspect="auto")
    axes.set_facecolor("#f3e9d2")  # cells without a measurement are not grey
    axes.grid(False)
    axes.spines[:].set_visible(True)
    axes.set_xticks(range(len(lengths)), [f"{length}" for length in lengths], rotation=45)
    axes.set_yticks(range(len(percent)), [*names, "mean"])
    depths = any(cell.depth is not None for cell in report.cells)
    axes.set(xlabel="length (tokens)", ylabel="depth of the key (0: start, 1: end)" if depths else "")
    axes.axhline(len(names) - 0.5, color=style.GREY, linewidth=2)
    inside = sum(length <= report.original_max_position_embeddings for length in lengths)
    # visible on white and on black; at the edge if all lengths are on one side
    for look in ({"color": "white", "linewidth": 3}, {"color": "black", "linewidth": 1.2, "linestyle": (0, (4, 3))}):
        axes.axvline(inside - 0.5, **look)  # type: ignore[arg-type]
    for (row, column), value in np.ndenumerate(percent):
        if not math.isnan(value):
            ink = "black" if value > 43 else "white"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=ink, fontsize=8)
    return image


Draw = Callable[[Sequence[Any]], "Figure"]
REPORT_KINDS: dict[str, Draw] = {
    "perplexity": draw_perplexity,
    "comparison": draw_comparison,
    "scores": draw_scores,
}
"""Kinds that draw reports: those of their name; a comparison, any but those of tuning."""


def choose_kind(reports: Sequence[AnyReport], name: str | None = None) -> Draw:
    """What draws the given kind, or the default for the reports. Raises DataError for reports that it cannot draw."""
    if name is None:
        several = len({report.digest for report in reports}) > 1
        many = len(reports) > _MOST_LINES or (several and len(reports) > 2) or reports[0].kind == "recall"
        name = "scores" if reports[0].kind == "scores" else "comparison" if many else "perplexity"
    for report in reports:
        if report.kind == "tune" or name not in ("comparison", report.kind):
            raise DataError(
                f"A plot of kind {name} cannot show the {report.kind} report of {report.checkpoint!r}. Give reports of "
                "one kind, or write a page of all of them with `ropecli report`."
            )
    return REPORT_KINDS[name]
