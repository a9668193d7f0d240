"""The score of a query and a key over their distance, and the single pairs' cosines that it is the sum of.

Source: "embedding and rope" (blog, 5 February 2025), its figure of frequencies, here for any rope. Far more distances
are summed than an axis has points: see `envelope`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.checkpoint.study import PRETRAINED, Study
from ropecli.report.charts import Chart, Series
from ropecli.report.plots import style
from ropecli.report.study.by_pair import subject
from ropecli.report.study.envelope import envelope, reach_of, width_of
from ropecli.report.wording import clean
from ropecli.rope import ScaledRope
from ropecli.theory.decay import decay_estimate
from ropecli.theory.distances import seen_distances
from ropecli.theory.score import LONGEST, first_negative, score
from ropecli.theory.wavelengths import effective_range, longest_wavelength

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

X_LABEL = "distance of query and key, m (tokens)"
Y_LABEL, _Y_WORDS = "score, Σ 2cos(mθ)", "score"
"""The second where Greek letters may be missing."""
TURNS = (36, 6)
"""Of the fast and the middle pair within the longest wavelength, about: faster ones would be a solid block there."""
_SHORTEST = 16
"""Tokens on an axis, at least."""
_MOST_TURNS = 60
_MARKERS = 7
"""On one line."""
_BAND = "#D4D4D4"
_MOST_BANDS = 2
"""Ropes; the bands of more would hide each other."""
_UNDER = 0.86
"""Of the upper axes' height the data take so much, and the bracket's name stands above them."""
_PAIR_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "black", "linewidth": 2.2},
    {"color": "black", "linewidth": 1.0, "linestyle": "--"},
    {"color": "#AAAAAA", "linewidth": 0.8},
)
"""Slowest, middle, fast."""
_COLUMNS = 90
"""Stretches in a chart of the terminal."""


def figure(study: Study) -> "Figure":
    below = _all_first_below(study)
    with style.drawing():
        figure = style.new_figure(13, 8.4)
        grid = figure.add_gridspec(2, 2, height_ratios=[1.2, 1])
        near = figure.add_subplot(grid[0, 0])
        far = figure.add_subplot(grid[0, 1], sharey=near)
        for axes, stop in ((near, near_stop(study)), (far, far_stop(study))):
            _draw_scores(axes, study, stop, below)
            _mark(axes, study, stop)
        _draw_estimate(near, study)
        low, high = near.get_ylim()
        near.set_ylim(low, low + (high - low) / _UNDER)
        _draw_bracket(far, study)
        near.set_title(f"near: {_near_in_words(study)}", fontsize=9)
        far.set_title(f"far: {_far_in_words(study)}", fontsize=9)
        _draw_cosines(figure.add_subplot(grid[1, :]), study)
        style.legend(far, *_named(near, far))
        style.legend(figure.axes[-1], *_named(figure.axes[-1]))
        style.title(figure, _title(study), _notes(study))
    return figure


def chart(study: Study) -> "RenderableType":
    from rich.console import Group

    near = _chart(study, near_stop(study), f"{_title(study)}; near: {_near_in_words(study)}", [])
    return Group(near, "", _chart(study, far_stop(study), f"far: {_far_in_words(study)}", _chart_notes(study)))


def near_stop(study: Study) -> int:
    """The first distance beyond the near axes, tokens: beyond the effective range of the pretrained rope."""
    effective = effective_range(study.ropes[PRETRAINED].inv_freq)
    return max(_SHORTEST, study.window if math.isnan(effective) else math.floor(effective) + 1)


def far_stop(study: Study) -> int:
    """The first beyond the far axes: beyond the target or the longest wavelength, whichever shows more."""
    longest = longest_wavelength(study.ropes[PRETRAINED].inv_freq)
    return max(_SHORTEST, study.target, 0 if math.isnan(longest) else math.floor(longest) + 1)


def first_below(rope: ScaledRope, target: int, stop: int) -> int | None:
    """The first true distance, tokens, with a negative score; None below `stop`, or `target` where it is remapped."""
    if rope.remapping is None:
        return first_negative(rope.inv_freq, min(LONGEST, stop - 1))
    for start in range(0, target, 4096):
        distances = np.arange(start, min(start + 4096, target))
        negative = np.flatnonzero(score(rope.inv_freq, seen_distances(rope, target, distances)) < 0)
        if negative.size:
            return start + int(negative[0])
    return None


def chosen_pairs(inv_freq: np.ndarray) -> list[int]:
    """A fast, a middle and the slowest turning pair, fewer where they are the same or none turns; slowest first."""
    turning = inv_freq[inv_freq > 0]
    if not turning.size:
        return []
    turns = turning / turning.min()
    slowest = len(turning) - 1
    nearest = [int(np.abs(np.log(turns / wanted)).argmin()) for wanted in TURNS[::-1]]
    return list(dict.fromkeys(pair for pair in (slowest, *nearest) if turns[pair] <= _MOST_TURNS))


def _all_first_below(study: Study) -> dict[str, int | None]:
    stop = far_stop(study)
    return {name: first_below(rope, study.target, stop) for name, rope in study.ropes.items()}


def _look(index: int) -> dict[str, Any]:
    """Of a rope by its place in the study; the pretrained one is the first."""
    return style.look(index) if index else {"color": "black", "linewidth": 1.8, "marker": ""}


def _spaced(look: dict[str, Any], index: int, count: int) -> dict[str, Any]:
    """With few markers, apart from one line to the next, so that lines that lie on each other are seen."""
    every = max(1, count // _MARKERS)
    return {**look, "markevery": (index * every // _MARKERS % max(1, count - 1), every)}


def _draw_scores(axes: "Axes", study: Study, stop: int, below: Mapping[str, int | None]) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    bands = []
    for index, (name, rope) in enumerate(study.ropes.items()):
        found, look = envelope(rope, stop, study.target), _look(index)
        label = f"{clean(name)}: {_below_in_words(below[name])}"
        axes.plot(found.distances, found.smooth(), label=label, **_spaced(look, index, len(found.distances)))
        if index < (2 if len(study.ropes) <= _MOST_BANDS else 1) and found.width > 1:
            bands.append((name, found, _BAND if index == 0 else look["color"]))
        first = below[name]
        if first is not None and first < stop:
            on_zero: dict[str, Any] = {
                "marker": look["marker"] or "|",
                "markersize": 8 if index else 13,
                "markerfacecolor": "white",
            }
            axes.plot([first], [0], color=look["color"], linestyle="", markeredgewidth=1.5, zorder=4, **on_zero)
    for place, (name, found, color) in enumerate(bands):
        axes.fill_between(
            found.distances,
            found.low,
            found.high,
            color=color,
            linewidth=0,
            alpha=0.3 if place else 1,
            zorder=1.5 + 0.1 * place,
            label=f"{clean(name)}, lowest to highest",
        )
    axes.set_xlabel(X_LABEL)
    axes.set_ylabel(Y_LABEL)


def _marks(study: Study, stop: int) -> list[tuple[float, str, Any]]:
    """What a vertical line below `stop` stands for: where, in words, and its dashes."""
    longest = longest_wavelength(study.ropes[PRETRAINED].inv_freq)
    marks: list[tuple[float, str, Any]] = [(float(study.window), f"pretraining window ({study.window})", (0, (6, 3)))]
    if study.target > study.window:
        marks.append((float(study.target), f"target ({study.target})", (0, (6, 2, 1, 2))))
    marks.append((longest, f"longest wavelength ({longest:.0f})", (0, (1, 2))))
    return [mark for mark in marks if mark[0] <= stop]


def _mark(axes: "Axes", study: Study, stop: int) -> None:
    """Vertical lines below the bracket's height, where the axis has room for them."""
    for where, label, dashes in _marks(study, stop):
        axes.axvline(where, ymax=_UNDER, color=style.GREY, linewidth=1.1, linestyle=dashes, label=label)
    axes.set_xlim(-0.01 * stop, 1.02 * stop)
    axes.xaxis.set_major_formatter("{x:.0f}")
    style.few_ticks(axes, "x", 7)


def _draw_estimate(axes: "Axes", study: Study) -> None:
    """The integral that stands for the sum, beside it."""
    geometry, stop = study.geometry, near_stop(study)
    distances = np.linspace(1, stop - 1, min(stop - 1, 400))
    estimate = geometry.rotary_dim * decay_estimate(study.ropes[PRETRAINED].inv_freq, distances).real
    axes.plot(distances, estimate, color="#7B3294", linewidth=0.9, label="pretrained, by integral")


def _draw_bracket(axes: "Axes", study: Study) -> None:
    effective = effective_range(study.ropes[PRETRAINED].inv_freq)
    if math.isnan(effective):
        return
    place: dict[str, Any] = {
        "transform": axes.get_xaxis_transform(),
        "color": "black",
        "linewidth": 1.5,
        "clip_on": False,
    }
    axes.plot([0, 0, effective, effective], [0.9, 0.93, 0.93, 0.9], **place)
    axes.annotate(
        f"effective range: {effective:{'.0f' if effective >= 100 else '.3g'}} tokens",
        (effective, 0.93),
        xycoords=axes.get_xaxis_transform(),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
    )


def _draw_cosines(axes: "Axes", study: Study) -> None:
    """The pretrained rope's, of three pairs; of the methods the slowest one's, beside whose turns others would hide."""
    pretrained = study.ropes[PRETRAINED].inv_freq
    pairs = chosen_pairs(pretrained)
    longest = longest_wavelength(pretrained)
    stop = far_stop(study) if math.isnan(longest) else longest
    distances = np.linspace(0, stop, 2001)
    for pair, look, order in reversed(list(zip(pairs, _PAIR_LOOKS, (3, 2.5, 2), strict=False))):
        label = f"pretrained, pair {pair}: λ = {2 * math.pi / pretrained[pair]:.0f}"
        axes.plot(distances, 2 * np.cos(distances * pretrained[pair]), label=label, zorder=order, **look)
    for index, (name, rope) in enumerate(study.ropes.items()):
        if index and rope.remapping is None and pairs:
            slowed = 2 * np.cos(distances * rope.inv_freq[pairs[0]])
            look = _spaced(_look(index), index, len(distances))
            axes.plot(distances, slowed, label=f"{clean(name)}, pair {pairs[0]}", zorder=3.5, **look)
    for where, label, dashes in [] if math.isnan(longest) else _marks(study, far_stop(study))[-1:]:
        axes.axvline(where, color=style.GREY, linewidth=1.1, linestyle=dashes, label=label)
    axes.set_xlim(-0.005 * stop, 1.01 * stop)
    axes.xaxis.set_major_formatter("{x:.0f}")
    style.few_ticks(axes, "x", 12)
    axes.set_title("single pairs", fontsize=9)
    axes.set_xlabel(X_LABEL)
    axes.set_ylabel("2cos(mθ)")


def _named(*several: "Axes") -> tuple[list[Any], list[str]]:
    """What a legend names of these axes, each label once."""
    found: dict[str, Any] = {}
    for axes in several:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)


def _below_in_words(below: int | None) -> str:
    return "never negative here" if below is None else f"first negative at {below}"


def _near_in_words(study: Study) -> str:
    effective = effective_range(study.ropes[PRETRAINED].inv_freq)
    if math.isnan(effective):
        return "the pretraining window, no pair turns"
    if effective < _SHORTEST:
        return f"the first {_SHORTEST} tokens"
    return "to the effective range, a tenth of the longest wavelength"


def _far_in_words(study: Study) -> str:
    return "to the target" if far_stop(study) == study.target else "to the longest wavelength"


def _title(study: Study) -> str:
    return f"The score of a query and a key that both hold ones over their distance, {subject(study)}"


def _notes(study: Study) -> list[str]:
    means = " and ".join(_mean_in_words(stop(study), which) for stop, which in ((near_stop, "near"), (far_stop, "far")))
    notes = [
        f"lines: {means}; a marker on the line at 0: where a score by itself is first negative",
        "by integral: the exponential integral that stands for the pretrained sum",
        *_shared_notes(study),
    ]
    pairs = chosen_pairs(study.ropes[PRETRAINED].inv_freq)
    if pairs and pairs[-1] > 0:
        notes.append("single pairs: faster ones than these would fill the axes")
    return ["; ".join(notes)]


def _mean_in_words(stop: int, which: str) -> str:
    reach = reach_of(stop)
    if reach == 1:
        return f"the score ({which})"
    return f"the mean over {reach} distances, in front of the lowest and highest of each {width_of(stop)} ({which})"


def _shared_notes(study: Study) -> list[str]:
    """For the picture and the terminal."""
    remapped = [clean(name) for name, rope in study.ropes.items() if rope.remapping is not None]
    notes = []
    if any(rope.attention_factor != 1 for rope in study.ropes.values()):
        notes.append("attention factors, which multiply all scores of a method alike, are left out")
    if remapped:
        notes.append(
            f"{', '.join(remapped)}: the score at the distance that the last of {study.target} tokens sees in place of "
            "the true one, and none where it sees no key"
        )
    return notes


def _chart_notes(study: Study) -> list[str]:
    below = _all_first_below(study).items()
    words = "; ".join(f"{clean(name)} {_below_in_words(first)}" for name, first in below)
    return [f"A score by itself, not the mean of neighbours: {words}.", *(f"{note}." for note in _shared_notes(study))]


def _chart(study: Study, stop: int, title: str, notes: Sequence[str]) -> Chart:
    series, width = [], width_of(stop, _COLUMNS)
    for name, rope in study.ropes.items():
        found = envelope(rope, stop, study.target, _COLUMNS)
        points = [(float(x), float(y)) for x, y in zip(found.distances, found.mean, strict=True)]
        series.append(Series(name, points, dense=True))
    return Chart(
        title=title,
        x_label=X_LABEL,
        y_label=f"{_Y_WORDS}, the mean of each {width} neighbouring distances" if width > 1 else _Y_WORDS,
        series=series,
        logarithmic=False,
        shown="{:.1f}".format,
        x_logarithmic=False,
        marks=[(where, label) for where, label, _ in _marks(study, stop)],
        levels=[(0.0, "score 0")],
        notes=notes,
    )
