"""Draws values and their changes from the base by length, and frequencies of rotary pairs.

An interval is drawn around the quantity that it belongs to: the paired 95% interval around a change. Frequencies: Peng
et al. 2023 (YaRN, arXiv:2309.00071), section 3; critical dimension: Liu et al. 2023 (arXiv:2310.05209), section 4.1.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropecli.analysis.summary import critical_dimension
from ropecli.checkpoint.inspection import PRETRAINED
from ropecli.errors import DataError
from ropecli.evaluation.protocols import SAME_TOKENS
from ropecli.evaluation.report import Change, Report
from ropecli.reporting.figures import style
from ropecli.reporting.lines import Line, base_of, lengths_of, sets_of, title_of
from ropecli.scaling.spec import ScaledRope
from ropecli.table import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

_MOST_BARS = 8
"""Lines with intervals; those of more would hide each other."""


def draw_lengths(reports: Sequence[Report]) -> "Figure":
    """Values by context length, and beside them the changes from the base. One row of panels for each set of data."""
    sets = sets_of(reports)
    sizes = [style.panel_size([line.name for line in lines]) for lines in sets]
    width = max(size[0] * len(panels(lines)) for size, lines in zip(sizes, sets, strict=True))
    heights = [height + 0.7 for _, height in sizes]
    with style.drawing():
        figure = style.new_figure(width, sum(heights))
        parts: Sequence[Figure | SubFigure] = [figure]
        if len(sets) > 1:
            parts = list(figure.subfigures(len(sets), 1, squeeze=False, height_ratios=heights)[:, 0])
        for part, lines in zip(parts, sets, strict=True):
            drawn = panels(lines)
            for axes, draw in zip(part.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
                draw(axes, lines)
            style.title(part, title_of(lines, f": {lines[0].report.title} by length"))
    return figure


def panels(lines: Sequence[Line]) -> "list[Callable[[Axes, Sequence[Line]], None]]":
    """The functions that draw a set: values, and changes if the longest length can be compared with the base."""
    base, longest = base_of(lines), lengths_of(lines)[-1]
    reports = [line.report for line in lines[1:] if longest in line.report.lengths]
    changes = base and any(report.change_at(base.report, longest) for report in reports)
    return [draw_values, draw_changes] if changes else [draw_values]


def draw_values(axes: "Axes", lines: Sequence[Line]) -> None:
    report = lines[0].report
    for line in lines:
        values = [line.report.value(length) for length in line.report.lengths]
        if len(values) == 1 < len(lengths_of(lines)) and line is base_of(lines) and line.report.task in SAME_TOKENS:
            axes.axhline(values[0], color=style.INK, linewidth=1.8, label=line.name)
        else:
            axes.plot(line.report.lengths, values, label=line.name, **line.look)
    better = "higher" if report.higher else "lower"
    axes.set_title(f"{report.title}{' (%)' * bool(report.unit)}, {better} is better", fontsize=9, loc="left")
    if report.logarithmic:
        style.log_axis(axes, [value for line in axes.lines for value in np.asarray(line.get_ydata())])
    elif report.unit:
        axes.set(ylim=(-4, 104), yticks=range(0, 101, 20))
        if chance := 100 * report.chance(report.lengths[-1]):
            axes.axhline(chance, color=style.GREY, linewidth=1, linestyle=(0, (1, 2)))
            axes.text(0.01, chance + 1, "guessing", transform=axes.get_yaxis_transform(), fontsize=7.5)
    _finish(axes, lines)


def draw_changes(axes: "Axes", lines: Sequence[Line]) -> None:
    """The changes from the base, a line at zero, and the intervals, moved aside where they would overlap."""
    report, base = lines[0].report, lines[0]
    zero, drawn = report.plotted(0), [report.plotted(0)]
    axes.axhline(zero, color=style.INK, linewidth=1.8, label=base.name)
    for number, line in enumerate(lines[1:]):
        lengths = line.report.lengths
        changes = {length: change for length in lengths if (change := line.report.change_at(base.report, length))}
        aside = 2 ** (0.035 * (number - (len(lines) - 2) / 2)) if len(lines) <= _MOST_BARS else 1
        spans = [_span(line, change) for change in changes.values()]
        points = [(length * aside, report.plotted(change.change)) for length, change in changes.items()]
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), label=line.name, **line.look)
        drawn += [y for _, y in points]
        for (x, _), span in zip(points, spans, strict=True):
            if span and len(lines) <= _MOST_BARS:
                axes.plot([x, x], span, color=line.look["color"], linewidth=1, marker="_", markersize=5)
                drawn += span
    bars = ", paired 95% intervals" * (len(lines) <= _MOST_BARS)
    axes.set_title(f"change from {base.name}{' (%)' * bool(report.unit)}{bars}", fontsize=9, loc="left")
    if report.logarithmic:
        style.log_axis(axes, drawn, ratio=True)
    _finish(axes, lines)


def _span(line: Line, change: Change) -> list[float]:
    """The ends of an interval on an axis; empty without one, and for one that float64 does not hold."""
    if change.low is None or change.high is None or (line.report.logarithmic and change.low == -1):
        return []
    return [line.report.plotted(change.low), line.report.plotted(change.high)]


def _finish(axes: "Axes", lines: Sequence[Line]) -> None:
    """The length axis, the pretraining lengths, and the names at the ends of the lines."""
    lengths, words = lengths_of(lines), "tokens"
    style.length_axis(axes, lengths)
    for length in sorted({line.report.original_max_position_embeddings for line in lines}):
        if lengths[0] <= 2 * length <= 4 * lengths[-1]:  # a distant mark would squeeze the data
            axes.axvline(length, color=style.GREY, linewidth=1, linestyle=(0, (6, 3)))
            words = "tokens; dashed: pretraining length"
    axes.set_xlabel(words)
    style.label_ends(axes)


def draw_frequencies(checkpoint: str, ropes: Mapping[str, ScaledRope], target: int) -> "Figure":
    """Frequency of each pair by method, relative to pretrained. Raises DataError if there is nothing to compare."""
    from matplotlib.ticker import MaxNLocator

    geometry, pretrained = ropes[PRETRAINED].geometry, ropes[PRETRAINED].inv_freq
    methods = {clean(name): rope for name, rope in ropes.items() if name != PRETRAINED}
    if not methods:
        raise DataError(
            f"There is nothing to compare: {clean(checkpoint)} is unscaled. Give methods and a factor, for "
            "example --methods yarn --factor 4."
        )
    rotating = {name: (rope.inv_freq > 0) & (pretrained > 0) for name, rope in methods.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = {name: np.where(rotating[name], rope.inv_freq / pretrained, np.nan) for name, rope in methods.items()}
    factors = sorted({rope.spec.factor for rope in methods.values() if rope.remapping is None} - {1.0})
    levels = {"as pretrained: 1": 1.0, **{f"1/s at factor {s:g}: {1 / s:.4g}": 1 / s for s in factors}}
    dimension = critical_dimension(geometry)
    remapped = [name for name, rope in methods.items() if rope.remapping is not None]
    still = [f"{np.sum(~pairs)} of {len(pairs)} ({name})" for name, pairs in rotating.items() if not pairs.all()]
    notes = [
        f"dash-dotted: critical dimension {dimension}; pairs before it complete a rotation in pretraining",
        f"distances change, not frequencies, so the line is at 1: {', '.join(remapped)}" if remapped else None,
        f"not shown, pairs that do not rotate: {', '.join(still)}" if still else None,
    ]
    with style.drawing():
        width, height = style.panel_size([*ratios, *levels])
        figure = style.new_figure(width + 2.5, height + 1)
        axes = figure.subplots()
        looks = style.looks(rope.spec.method.name for rope in methods.values())
        for index, (look, (name, values)) in enumerate(zip(looks, ratios.items(), strict=True)):
            every = math.ceil(max(len(values) / 16, min(len(ratios), len(values) / 5)))
            # offset the markers, so that overlapping lines are visible
            axes.plot(values, label=name, **{**look, "markevery": (index % every, every)})
        for name, y in levels.items():
            axes.axhline(y, color=style.GREY, linewidth=1, linestyle=(0, (2, 2)), label=name, zorder=1)
        axes.axvline(dimension / 2 - 0.5, color=style.GREY, linewidth=1, linestyle="-.", zorder=1)
        style.log_axis(axes, [*levels.values(), *(ratio for of in ratios.values() for ratio in of if ratio > 0)])
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 10]))
        axes.set(xlabel="rotary pair, fastest first", ylabel="frequency ÷ pretrained frequency, logarithmic")
        style.label_ends(axes)
        layers = f", {clean(geometry.layer_type)} layers" if geometry.layer_type else ""
        subject = (
            f"{clean(checkpoint)}{layers}: rotary_dim {geometry.rotary_dim}, rope_theta {geometry.rope_theta:.10g}"
        )
        lengths = f"pretraining length {geometry.original_max_position_embeddings}, target {target} tokens"
        style.title(figure, f"Frequency of each pair relative to pretrained, {subject}, {lengths}", notes)
    return figure
