"""What the plots over the pairs share: the axis, what a title and notes say of a study, and which markers are shown.

A logarithmic axis has no place for 0 and infinity: they stand in a band beyond its numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.checkpoint.study import Study
from ropecli.report.plots import style
from ropecli.report.wording import clean, told_apart
from ropecli.theory.wavelengths import turns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ropecli.report.charts import Chart

X_LABEL = "pair of dimensions, fastest first"
_MARKERS_A_LINE = 16
"""At most; 64 of them or more would be a smear."""
_FEWEST_MARKERS = 5
_BAND, _ROW, _ROWS = 0.08, 0.05, 0.4
"""Shares of the axis: from its numbers to the band's first row, from row to row at most, and of all rows at most."""


def chart_by_pair(title: str, y_label: str, lines: Iterable[tuple[str, np.ndarray]], **others: Any) -> "Chart":
    """For the terminal. lines: names, and a value for each pair. others: of Chart."""
    from ropecli.report.charts import Chart, Series

    return Chart(
        title=title,
        x_label=X_LABEL,
        y_label=y_label,
        series=[
            Series(name, [(float(pair), float(one)) for pair, one in enumerate(values)], dense=True)
            for name, values in lines
        ],
        logarithmic=True,
        x_logarithmic=False,
        shown_x="pair {:.0f}".format,
        **others,
    )


def subject(study: Study) -> str:
    """Which checkpoint, and what its rotary embedding was pretrained with."""
    rope = study.geometry
    part = f" of head_dim {rope.head_dim}" if rope.rotary_dim != rope.head_dim else ""
    layers = f", {clean(rope.layer_type)} layers" if rope.layer_type else ""
    return (
        f"{clean(study.checkpoint)}{layers}: rotary_dim {rope.rotary_dim}{part}, rope_theta {rope.rope_theta:.10g}, "
        f"pretraining window {study.window}, target {study.target} tokens"
    )


def turning_in_window(inv_freq: np.ndarray, study: Study) -> np.ndarray:
    """Whether each pair completes a turn inside the pretraining window, shape (rotary_dim/2,)."""
    return turns(inv_freq, study.window) >= 1


def remapping_notes(study: Study, unchanged: str) -> list[str]:
    """Which methods change distances, and therefore what of theirs is `unchanged`."""
    names = [clean(name) for name, rope in study.ropes.items() if rope.remapping is not None]
    if not names:
        return []
    verb = "changes" if len(names) == 1 else "change"
    return [f"{', '.join(names)} {verb} distances and no frequency: {unchanged}"]


def still_notes(still: Mapping[str, np.ndarray], edge: str) -> list[str]:
    """Which ropes have how many pairs that do not turn, and where on the axis. still: of each rope, by pair."""
    told = [f"{pairs.sum()} of {len(pairs)} pairs of {clean(name)}" for name, pairs in still.items() if pairs.any()]
    return [f"do not turn, shown at {edge}: {', '.join(told)}"] if told else []


def draw_line(axes: "Axes", values: np.ndarray, index: int, lines: int, name: str, hollow: np.ndarray) -> Any:
    """The line with this index among `lines`, and its entry for the legend.

    values: shape (rotary_dim/2,), NaN for gaps. hollow: of the same shape, whether a pair's marker is not filled.
    Solid lines lie below dashed ones and all below the markers, so that lines that lie on each other are all seen.
    """
    from matplotlib.lines import Line2D

    pairs, look = np.arange(len(values)), style.look(index)
    bare = {**look, "marker": ""}
    (line,) = axes.plot(pairs, values, label=name, **bare)
    line.set_zorder(2.2 if line.is_dashed() else 2.1)
    marked = _marked_pairs(len(values), index, lines)
    for kind, fill in ((~hollow, look["color"]), (hollow, "white")):
        at = marked[kind[marked]]
        markers = {**look, "linestyle": "none", "markerfacecolor": fill, "zorder": 2.3}
        axes.plot(at, values[at], label="_markers", **markers)
    return Line2D([], [], label=name, **look)


def _marked_pairs(pairs: int, index: int, lines: int) -> np.ndarray:
    """Others than the neighbouring lines', as far as there are enough."""
    step = max(math.ceil(pairs / _MARKERS_A_LINE), min(lines, math.ceil(pairs / _FEWEST_MARKERS)))
    return np.arange(index % step, pairs, step)


def pair_axis(axes: "Axes", pairs: int) -> None:
    """The x axis: pairs by their index, from 0."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.5 - 0.02 * pairs, pairs - 0.5 + 0.02 * pairs)
    axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 10]))
    axes.set_xlabel(X_LABEL)


def mark_level(axes: "Axes", y: float, name: str, dashes: tuple[int, int]) -> Any:
    """A horizontal line behind the data, for the legend. dashes: points drawn and left out."""
    return axes.axhline(y, color=style.GREY, linewidth=1, linestyle=(0, dashes), label=name, zorder=1)


def banded_axis(
    axes: "Axes", values: Sequence[float], beyond: Sequence[np.ndarray], edge: str, upper: bool = False
) -> None:
    """The y axis, logarithmic, of `values`, above 0, and a band named `edge` below or above them.

    beyond: of each line, whether its pairs stand in the band, shape (rotary_dim/2,); a row for each line that has any.
    """
    rows = [index for index, pairs in enumerate(beyond) if pairs.any()]
    low, high = min(values), max(values)
    power = math.log10(high / low) or 1.0
    apart = min(_ROW, _ROWS / max(1, len(rows)))
    heights = [power * (_BAND + apart * place) for place in range(len(rows))]
    places = [high * 10**height if upper else low / 10**height for height in heights]
    for index, place in zip(rows, places, strict=True):
        row = np.where(beyond[index], place, np.nan)
        draw_line(axes, row, index, len(beyond), f"_{edge}", hollow=beyond[index])
    style.value_axis(axes, "y", [*values, *places])
    # none in the band but its name
    ticks = [tick for tick in axes.get_yticks() if not rows or low / 1.01 <= tick <= high * 1.01]
    named = [math.sqrt(places[0] * places[-1])] if rows else []
    axes.set_yticks([*ticks, *named], [*told_apart(ticks, 10), *(edge for _ in named)])
