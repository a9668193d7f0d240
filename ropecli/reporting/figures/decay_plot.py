"""Draws the score of a query and a key over their distance, and the single pairs' cosines that it is the sum of.

Source: "embedding and rope" (blog, 5 February 2025), its figure of frequencies, here for any rope.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.analysis.decay import decay_estimate
from ropecli.analysis.score import LONGEST, first_negative, score, seen_distances
from ropecli.analysis.wavelengths import effective_range, longest_wavelength
from ropecli.checkpoint.inspection import PRETRAINED, Study
from ropecli.reporting.figures import style
from ropecli.reporting.figures.frequencies_plot import study_subject
from ropecli.reporting.wording import clean
from ropecli.scaling.spec import ScaledRope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHORTEST = 16
"""Tokens on an axis, at least."""
_STRETCHES = 120
_MOST = 1024
"""Distances that are looked at in a stretch; of a longer one so many stand for all."""
_TURNS = (6, 36)
"""Of the middle and the fast pair within the longest wavelength, about: faster ones would be a solid block there."""
_MOST_TURNS = 60
_PAIR_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "black", "linewidth": 2.2, "zorder": 3},
    {"color": "black", "linewidth": 1.0, "linestyle": "--", "zorder": 2.5},
    {"color": "#AAAAAA", "linewidth": 0.8},
)
"""Slowest, middle, fast."""


def draw_decay(study: Study) -> "Figure":
    """Near: to the effective range; far: to the target or the longest wavelength; below: single pairs."""
    pretrained = study.ropes[PRETRAINED].inv_freq
    effective, longest = effective_range(pretrained), longest_wavelength(pretrained)
    near_stop = max(_SHORTEST, study.original_length if math.isnan(effective) else math.floor(effective) + 1)
    far_stop = max(_SHORTEST, study.target, 0 if math.isnan(longest) else math.floor(longest) + 1)
    with style.drawing():
        figure = style.new_figure(13.5, 8.4)
        grid = figure.add_gridspec(2, 2, height_ratios=[1.2, 1])
        near = figure.add_subplot(grid[0, 0])
        far = figure.add_subplot(grid[0, 1], sharey=near)
        for axes, stop, name in ((near, near_stop, "near"), (far, far_stop, "far")):
            _draw_scores(axes, study, stop, far_stop)
            axes.set_title(f"{name}: up to {stop - 1} tokens", fontsize=9)
            _mark(axes, study, stop)
        distances = np.linspace(1, near_stop - 1, 400)
        estimate = study.geometry.rotary_dim * decay_estimate(pretrained, distances).real
        near.plot(distances, estimate, color="#7B3294", linewidth=0.9, label="pretrained, by integral")
        pairs = figure.add_subplot(grid[1, :])
        _draw_pairs(pairs, study, far_stop)
        named = dict(zip(*far.get_legend_handles_labels()[::-1], strict=True))
        named |= dict(zip(*near.get_legend_handles_labels()[::-1], strict=True))
        style.legend(far, list(named.values()))
        style.legend(pairs)
        style.title(
            figure,
            f"The score of a query and a key that both hold ones over their distance, {study_subject(study)}",
            ["; ".join(_notes(study, near_stop, far_stop))],
        )
    return figure


def stretches(rope: ScaledRope, stop: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The distances 0 to stop - 1 in stretches: the middle of each, and the lowest, mean and highest score in it.

    A curve that turns every six tokens and is drawn by every tenth of them shows a wave that is not there; lowest and
    highest hide none. Of a rope that remaps distances, the scores at those that the last of `target` tokens sees in
    place of the true ones, NaN where that is masked and beyond the target.
    """
    found = []
    for start in range(0, stop, width_of(stop)):
        end = min(start + width_of(stop), stop)
        distances = np.arange(start, end)
        if len(distances) > _MOST:  # at no even step, in which a pair might stand still
            distances = np.sort(np.random.default_rng(start).integers(start, end, _MOST))
        seen = distances.astype(np.float64)
        if rope.remapping is not None:
            seen = np.full(len(distances), np.nan)
            seen[distances < target] = seen_distances(rope, target, distances[distances < target])
        values = score(rope.inv_freq, seen)
        values = values[~np.isnan(values)] if not np.isnan(values).all() else np.array([np.nan])
        found.append(((start + end - 1) / 2, values.min(), values.mean(), values.max()))
    middle, low, mean, high = np.array(found).T
    return middle, low, mean, high


def width_of(stop: int) -> int:
    """Of a stretch, tokens."""
    return -(-stop // _STRETCHES)


def chosen_pairs(inv_freq: np.ndarray) -> list[int]:
    """The slowest turning pair, a middle and a fast one; fewer where they are the same or none turns."""
    turning = inv_freq[inv_freq > 0]
    if not turning.size:
        return []
    turns = turning / turning.min()
    nearest = [int(np.abs(np.log(turns / wanted)).argmin()) for wanted in _TURNS]
    return list(dict.fromkeys(pair for pair in (len(turning) - 1, *nearest) if turns[pair] <= _MOST_TURNS))


def _look(index: int, points: int) -> dict[str, Any]:
    """Of a rope by its place in the study; the pretrained one is the first. Few markers, apart from line to line."""
    every = max(1, points // 7)
    plain = {"color": "black", "linewidth": 1.8}
    return {**style.look(index), "markevery": (index * every // 7 % points, every)} if index else plain


def _draw_scores(axes: "Axes", study: Study, stop: int, longest: int) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    for index, (name, rope) in enumerate(study.ropes.items()):
        distances, low, mean, high = stretches(rope, stop, study.target)
        label, below = clean(name), None
        if rope.remapping is None:
            below = first_negative(rope.inv_freq, min(LONGEST, longest))
            label += f": {f'first negative at {below}' if below else 'never negative here'}"
        look = _look(index, len(distances))
        axes.plot(distances, mean, label=label, **look)
        if below is not None and below < stop:
            marker = {"marker": look.get("marker", "|"), "markersize": 9, "markerfacecolor": "white", "zorder": 4}
            axes.plot([below], [0], color=look["color"], label=style.UNNAMED, mew=1.5, **marker)
        if index == 0 and width_of(stop) > 1:
            axes.fill_between(distances, low, high, color="#D4D4D4", linewidth=0, label=f"{name}, lowest to highest")
    axes.set(xlabel="distance of query and key, m (tokens)", ylabel="score, Σ 2cos(mθ)")


def _mark(axes: "Axes", study: Study, stop: int) -> None:
    """Vertical lines at the lengths that tell something, below `stop`."""
    pretrained = study.ropes[PRETRAINED].inv_freq
    effective, longest = effective_range(pretrained), longest_wavelength(pretrained)
    marks: list[tuple[float, str, Any]] = [
        (float(study.original_length), f"pretraining length ({study.original_length})", (0, (6, 3)))
    ]
    if study.target > study.original_length:
        marks.append((float(study.target), f"target ({study.target})", (0, (6, 2, 1, 2))))
    marks.append((effective, f"effective range ({effective:.0f})", (0, (3, 2))))
    marks.append((longest, f"longest wavelength ({longest:.0f})", (0, (1, 2))))
    for where, label, dashes in marks:
        if where <= stop:
            axes.axvline(where, color=style.GREY, linewidth=1.1, linestyle=dashes, label=label)
    axes.set_xlim(-0.01 * stop, 1.02 * stop)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.locator_params(axis="x", nbins=7)


def _draw_pairs(axes: "Axes", study: Study, far_stop: int) -> None:
    """The pretrained cosines of three pairs; of the methods the slowest one's, beside whose turns others would hide."""
    pretrained = study.ropes[PRETRAINED].inv_freq
    pairs, longest = chosen_pairs(pretrained), longest_wavelength(pretrained)
    distances = np.linspace(0, far_stop if math.isnan(longest) else longest, 2001)
    for pair, look in zip(pairs, _PAIR_LOOKS, strict=False):
        label = f"pretrained, pair {pair}: λ = {2 * math.pi / pretrained[pair]:.0f}"
        axes.plot(distances, 2 * np.cos(distances * pretrained[pair]), label=label, **look)
    for index, (name, rope) in enumerate(study.ropes.items()):
        if index and rope.remapping is None and pairs:
            slowed = 2 * np.cos(distances * rope.inv_freq[pairs[0]])
            axes.plot(distances, slowed, label=f"{clean(name)}, pair {pairs[0]}", **_look(index, len(distances)))
    axes.set_title("single pairs", fontsize=9)
    axes.set(xlabel="distance of query and key, m (tokens)", ylabel="2cos(mθ)")
    axes.margins(x=0.005)
    axes.xaxis.set_major_formatter("{x:.0f}")


def _notes(study: Study, near_stop: int, far_stop: int) -> Sequence[str]:
    widths = width_of(near_stop), width_of(far_stop)
    notes = [
        f"lines: the mean of each {widths[0]} (near) and {widths[1]} (far) neighbouring distances",
        "a marker on the line at 0: where a score by itself is first negative",
        "by integral: the exponential integral that stands for the pretrained sum",
    ]
    if not study.geometry.still_pairs:
        notes.append("products of sinusoidal embeddings of this base are half the pretrained scores")
    if any(rope.attention_factor != 1 for rope in study.ropes.values()):
        notes.append("attention factors, which multiply all scores of a method alike, are left out")
    remapped = [clean(name) for name, rope in study.ropes.items() if rope.remapping is not None]
    if remapped:
        notes.append(f"{', '.join(remapped)}: at the distance that the last of {study.target} tokens sees")
    return notes
