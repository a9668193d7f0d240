"""Draws the attention score against the query-key distance, and the cosines of single pairs, which sum to it.

Source: the figure of frequencies in "embedding and rope" (blog, 5 February 2025), generalized to any rope.
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
from ropecli.scaling.spec import ScaledRope
from ropecli.table import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHORTEST = 16
"""Minimum tokens on an axis."""
_STRETCHES = 120
_MAX_SAMPLES = 1024
"""Maximum distances evaluated in a stretch; longer stretches are sampled."""
_ROTATIONS = (6, 36)
"""Approximate rotations of the middle and the fast pair within the longest wavelength; more would be a solid block."""
_MAX_ROTATIONS = 60
_PAIR_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "black", "linewidth": 2.2, "zorder": 3},
    {"color": "black", "linewidth": 1.0, "linestyle": "--", "zorder": 2.5},
    {"color": "#AAAAAA", "linewidth": 0.8},
)
"""Slowest, middle, fast."""


def draw_decay(study: Study) -> "Figure":
    """Panels: near, up to the effective range; far, up to the target or the longest wavelength; single pairs."""
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
            _mark(axes, study, stop, effective, longest)
        distances = np.linspace(1, near_stop - 1, 400)
        estimate = study.geometry.rotary_dim * decay_estimate(pretrained, distances).real
        near.plot(distances, estimate, color="#7B3294", linewidth=0.9, label="pretrained, integral estimate")
        pairs = figure.add_subplot(grid[1, :])
        _draw_pairs(pairs, study, far_stop)
        named = dict(zip(*far.get_legend_handles_labels()[::-1], strict=True))
        named |= dict(zip(*near.get_legend_handles_labels()[::-1], strict=True))
        style.legend(far, list(named.values()))
        style.legend(pairs)
        style.title(
            figure,
            f"Attention score of an all-ones query and key by distance, {study_subject(study)}",
            ["; ".join(_notes(study, near_stop, far_stop))],
        )
    return figure


def stretches(rope: ScaledRope, stop: int, target: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Split the distances 0 to stop - 1 into stretches: (middle, lowest, mean, highest score) of each.

    Drawing every tenth point of a curve with a period of six tokens would show a false wave (aliasing); lowest and
    highest show the true range. For a rope that remaps distances: the scores at the remapped distances that the last
    of `target` tokens sees, NaN where masked and beyond the target.
    """
    lengths = []
    for start in range(0, stop, width_of(stop)):
        end = min(start + width_of(stop), stop)
        distances = np.arange(start, end)
        if len(distances) > _MAX_SAMPLES:  # random, because an even step could hide a pair
            distances = np.sort(np.random.default_rng(start).integers(start, end, _MAX_SAMPLES))
        seen = distances.astype(np.float64)
        if rope.remapping is not None:
            seen = np.full(len(distances), np.nan)
            seen[distances < target] = seen_distances(rope, target, distances[distances < target])
        values = score(rope.inv_freq, seen)
        values = values[~np.isnan(values)] if not np.isnan(values).all() else np.array([np.nan])
        lengths.append(((start + end - 1) / 2, values.min(), values.mean(), values.max()))
    middle, low, mean, high = np.array(lengths).T
    return middle, low, mean, high


def width_of(stop: int) -> int:
    """Width of a stretch, tokens."""
    return -(-stop // _STRETCHES)


def chosen_pairs(inv_freq: np.ndarray) -> list[int]:
    """The slowest rotating pair, a middle and a fast one; fewer if they coincide or no pair rotates."""
    rotating = inv_freq[inv_freq > 0]
    if not rotating.size:
        return []
    relative = rotating / rotating.min()
    nearest = [int(np.abs(np.log(relative / rotations)).argmin()) for rotations in _ROTATIONS]
    return list(dict.fromkeys(pair for pair in (len(rotating) - 1, *nearest) if relative[pair] <= _MAX_ROTATIONS))


def _look(index: int, points: int) -> dict[str, Any]:
    """Style of a rope by its index in the study; 0 is the pretrained one. Markers are few and offset between lines."""
    every = max(1, points // 7)
    pretrained = {"color": "black", "linewidth": 1.8}
    return {**style.look(index), "markevery": (index * every // 7 % points, every)} if index else pretrained


def _draw_scores(axes: "Axes", study: Study, stop: int, longest: int) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    for index, (name, rope) in enumerate(study.ropes.items()):
        distances, low, mean, high = stretches(rope, stop, study.target)
        label, below = clean(name), None
        if rope.remapping is None:
            below = first_negative(rope.inv_freq, min(LONGEST, longest))
            label += f": {f'first negative at {below}' if below else 'never negative in this range'}"
        look = _look(index, len(distances))
        axes.plot(distances, mean, label=label, **look)
        if below is not None and below < stop:
            marker = {"marker": look.get("marker", "|"), "markersize": 9, "markerfacecolor": "white", "zorder": 4}
            axes.plot([below], [0], color=look["color"], label=style.UNNAMED, mew=1.5, **marker)
        if index == 0 and width_of(stop) > 1:
            axes.fill_between(distances, low, high, color="#D4D4D4", linewidth=0, label=f"{name}, min to max")
    axes.set(xlabel="query-key distance m (tokens)", ylabel="score, Σ 2cos(mθ)")


def _mark(axes: "Axes", study: Study, stop: int, effective: float, longest: float) -> None:
    """Vertical lines at notable lengths up to `stop`."""
    original_length, target = study.original_length, study.target
    marks: list[tuple[str, float, tuple[int, ...]]] = [
        ("pretraining length", original_length, (6, 3)),
        *([("target", target, (6, 2, 1, 2))] if target > original_length else []),
        ("effective range", effective, (3, 2)),
        ("longest wavelength", longest, (1, 2)),
    ]
    for name, where, dashes in marks:
        if where <= stop:
            look: dict[str, Any] = {"color": style.GREY, "linewidth": 1.1, "linestyle": (0, dashes)}
            axes.axvline(where, label=f"{name} ({where:.0f})", **look)
    axes.set_xlim(-0.01 * stop, 1.02 * stop)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.locator_params(axis="x", nbins=7)


def _draw_pairs(axes: "Axes", study: Study, far_stop: int) -> None:
    """Cosines of three pretrained pairs, and of the slowest pair for each method; more would hide each other."""
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
    axes.set(xlabel="query-key distance m (tokens)", ylabel="2cos(mθ)")
    axes.margins(x=0.005)
    axes.xaxis.set_major_formatter("{x:.0f}")


def _notes(study: Study, near_stop: int, far_stop: int) -> Sequence[str]:
    widths = width_of(near_stop), width_of(far_stop)
    notes = [
        f"lines: mean over every {widths[0]} (near) or {widths[1]} (far) adjacent distances",
        "marker at 0: the first negative score",
        "integral estimate: the exponential integral that approximates the pretrained sum",
    ]
    if not study.geometry.still_pairs:
        notes.append("inner products of sinusoidal embeddings with this base are half the pretrained scores")
    if any(rope.attention_factor != 1 for rope in study.ropes.values()):
        notes.append("attention factors, which scale all scores of a method equally, are not included")
    remapped = [clean(name) for name, rope in study.ropes.items() if rope.remapping is not None]
    if remapped:
        notes.append(f"{', '.join(remapped)}: at the remapped distances seen by the last of {study.target} tokens")
    return notes
