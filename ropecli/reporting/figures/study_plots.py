"""Draws theory: the frequency of each rotary pair relative to the pretrained one, and the score by distance.

Sources: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 3 (h(θ_d)/θ_d); Liu et al. 2023 (arXiv:2310.05209), section
4.1, for the critical dimension; the figure of frequencies in "embedding and rope" (blog, 5 February 2025), for decay.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.analysis.decay import decay_estimate
from ropecli.analysis.score import LONGEST, first_negative, score
from ropecli.analysis.wavelengths import critical_dimension, effective_range, longest_wavelength
from ropecli.checkpoint.inspection import PRETRAINED, Study
from ropecli.errors import DataError
from ropecli.reporting.figures import style
from ropecli.scaling.spec import ScaledRope
from ropecli.table import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = 16
"""Maximum per line."""
_SHORTEST = 16
"""Minimum tokens on an axis."""
_STRETCHES = 120
_SAMPLES = 512
"""Maximum distances evaluated in a stretch."""
_ROTATIONS = (1, 6, 36)
"""Approximate rotations of the slowest, the middle and the fast pair within the longest wavelength."""
_MOST_ROTATIONS = 60
"""More would be a solid block."""
_PAIR_LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "black", "linewidth": 2.2, "zorder": 3},
    {"color": "black", "linewidth": 1.0, "linestyle": "--", "zorder": 2.5},
    {"color": "#AAAAAA", "linewidth": 0.8},
)
"""Slowest, middle, fast."""


def draw_frequencies(study: Study) -> "Figure":
    """Frequency of each pair by method, relative to pretrained. Raises DataError if there is nothing to compare."""
    from matplotlib.ticker import MaxNLocator

    geometry, pretrained = study.geometry, study.geometry.inv_freq()
    methods = {clean(name): rope for name, rope in study.ropes.items() if name != PRETRAINED}
    if not methods:
        raise DataError(
            f"There is nothing to compare: {clean(study.checkpoint)} is unscaled. Give methods and a factor, for "
            "example --methods yarn --factor 4."
        )
    rotating = {name: (rope.inv_freq > 0) & (pretrained > 0) for name, rope in methods.items()}
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = {name: np.where(rotating[name], rope.inv_freq / pretrained, np.nan) for name, rope in methods.items()}
    factors = sorted({rope.spec.factor for rope in methods.values() if rope.remapping is None} - {1.0})
    levels = {"as pretrained: 1": 1.0, **{f"1/s at factor {s:g}: {1 / s:.4g}": 1 / s for s in factors}}
    dimension = critical_dimension(geometry)
    border = f"critical dimension {dimension}: the pairs before it complete a rotation inside the pretraining length"
    remapped = [name for name, rope in methods.items() if rope.remapping is not None]
    still = [f"{np.sum(~pairs)} of {len(pairs)} ({name})" for name, pairs in rotating.items() if not pairs.all()]
    notes = [
        f"distances change, not frequencies, so the line is at 1: {', '.join(remapped)}" if remapped else None,
        f"not shown, pairs that do not rotate: {', '.join(still)}" if still else None,
    ]
    with style.drawing():
        figure, (axes,) = style.line_figure(list(ratios), [*levels, border])
        for index, (name, values) in enumerate(ratios.items()):
            every = math.ceil(max(len(values) / _MARKERS, min(len(ratios), len(values) / 5)))
            # offset the markers, so that overlapping lines are visible
            axes.plot(values, label=name, **{**style.look(index), "markevery": (index % every, every)})
        for dashes, (name, y) in zip(((6, 3), *[(2, 2)] * len(levels)), levels.items(), strict=False):
            axes.axhline(y, color=style.GREY, linewidth=1, linestyle=(0, dashes), label=name, zorder=1)
        axes.axvline(dimension / 2 - 0.5, color=style.GREY, linewidth=1, linestyle="-.", label=border, zorder=1)
        positive = [ratio for values in ratios.values() for ratio in values if ratio > 0]
        style.log_axis(axes.yaxis, [*positive, *levels.values()])
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 10]))
        axes.set(xlabel="rotary pair, fastest first", ylabel="frequency ÷ pretrained frequency, logarithmic")
        style.legend(axes)
        style.title(figure, f"Frequency of each pair relative to pretrained, {_subject(study)}", notes)
    return figure


def _subject(study: Study) -> str:
    geometry = study.geometry
    layers = f", {clean(geometry.layer_type)} layers" if geometry.layer_type else ""
    subject = f"{clean(study.checkpoint)}{layers}: rotary_dim {geometry.rotary_dim}"
    lengths = f"pretraining length {study.original_length}, target {study.target} tokens"
    return f"{subject}, rope_theta {geometry.rope_theta:.10g}, {lengths}"


def draw_decay(study: Study) -> "Figure":
    """Panels: near, up to the effective range; far, up to the target or the longest wavelength; single pairs."""
    inv_freq = study.geometry.inv_freq()
    effective, longest = effective_range(inv_freq), longest_wavelength(inv_freq)
    near = max(_SHORTEST, study.original_length if math.isnan(effective) else math.floor(effective) + 1)
    far = max(_SHORTEST, study.target, 0 if math.isnan(longest) else math.floor(longest) + 1)
    remapped = [clean(name) for name, rope in study.ropes.items() if rope.remapping is not None]
    notes = [
        f"lines: mean over every {_width_of(near)} (near) or {_width_of(far)} (far) adjacent distances; marker at 0: "
        "the first negative score; integral estimate: the exponential integral that approximates the pretrained sum; "
        "attention factors are not included",
        f"at the remapped distances seen by the last of {study.target} tokens: {', '.join(remapped)}" * bool(remapped),
    ]
    with style.drawing():
        figure = style.new_figure(13.5, 8.4)
        panels = figure.subplot_mosaic([["near", "far"], ["pairs", "pairs"]], height_ratios=[1.2, 1])
        panels["far"].sharey(panels["near"])
        for name, stop in (("near", near), ("far", far)):
            _draw_scores(panels[name], study, stop, far)
            panels[name].set_title(f"{name}: up to {stop - 1} tokens", fontsize=9)
        _draw_pairs(panels["pairs"], study, longest)
        style.legend(panels["far"])
        style.legend(panels["pairs"])
        subject = f"Attention score of an all-ones query and key by distance, {_subject(study)}"
        style.title(figure, subject, notes)
    return figure


def _width_of(stop: int) -> int:
    """Width of a stretch, tokens."""
    return -(-stop // _STRETCHES)


def _stretches(rope: ScaledRope, stop: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the distances 0 to stop - 1 into stretches: their middles, and scores of shape (stretches, samples).

    Drawing every tenth point of a curve with a period of six tokens would show a false wave (aliasing). For a rope that
    remaps distances: the scores at the remapped distances that the last of `target` tokens sees, masked where it sees
    none.
    """
    width = _width_of(stop)
    starts = np.arange(0, stop, width)[:, None]
    inside = np.arange(width)
    if width > _SAMPLES:  # random, because an even step could hide a pair
        inside = np.random.default_rng(0).integers(width, size=(len(starts), _SAMPLES))
    seen = (starts + inside).astype(np.float64)
    if rope.remapping is not None:
        keys = target - 1 - (starts + inside).ravel()
        seen = rope.remapping.distances(np.array([target - 1]), keys).reshape(seen.shape)
    return starts[:, 0] + (width - 1) / 2, np.ma.masked_invalid(score(rope.inv_freq, seen))


def _chosen_pairs(inv_freq: np.ndarray) -> list[int]:
    """The slowest rotating pair, a middle and a fast one; fewer if they coincide or no pair rotates."""
    rotating = inv_freq[inv_freq > 0]
    relative = rotating / rotating.min(initial=math.inf)
    nearest = [int(np.abs(np.log(relative / rotations)).argmin()) for rotations in _ROTATIONS if rotating.size]
    return [pair for pair in dict.fromkeys(nearest) if relative[pair] <= _MOST_ROTATIONS]


def _decay_look(index: int, points: int) -> dict[str, Any]:
    """Style of a rope by its index in the study; 0 is the pretrained one. Markers are few and offset between lines."""
    every = max(1, points // 7)
    pretrained = {"color": "black", "linewidth": 1.8}
    return {**style.look(index), "markevery": (index * every // 7 % points, every)} if index else pretrained


def _draw_scores(axes: "Axes", study: Study, stop: int, farthest: int) -> None:
    """The score of each rope, the integral estimate, and vertical lines at the notable lengths up to `stop`."""
    axes.axhline(0, color="black", linewidth=0.6)
    for index, (name, rope) in enumerate(study.ropes.items()):
        middles, scores = _stretches(rope, stop, study.target)
        label, below = clean(name), None
        if rope.remapping is None:
            below = first_negative(rope.inv_freq, min(LONGEST, farthest))
            label += f": {f'first negative at {below}' if below else 'never negative in this range'}"
        look = _decay_look(index, len(middles))
        axes.plot(middles, scores.mean(axis=1), label=label, **look)
        if below is not None and below < stop:
            axes.plot([below], [0], look.get("marker", "|"), color=look["color"], ms=9, mfc="white", mew=1.5, zorder=4)
        if index == 0 and _width_of(stop) > 1:
            span = scores.min(axis=1), scores.max(axis=1)
            axes.fill_between(middles, *span, color="#D4D4D4", linewidth=0, label=f"{name}, min to max")
    pretrained, distances = study.geometry.inv_freq(), np.linspace(1, stop - 1, 400)
    estimate = study.geometry.rotary_dim * decay_estimate(pretrained, distances).real
    axes.plot(distances, estimate, color="#7B3294", linewidth=0.9, label="pretrained, integral estimate")
    for name, length, dashes in (
        ("pretraining length", study.original_length, (6, 3)),
        ("target", study.target if study.target > study.original_length else math.nan, (6, 2, 1, 2)),
        ("effective range", effective_range(pretrained), (3, 2)),
        ("longest wavelength", longest_wavelength(pretrained), (1, 2)),
    ):
        if length <= stop:
            axes.axvline(length, color=style.GREY, linewidth=1.1, ls=(0, dashes), label=f"{name} ({length:.0f})")
    axes.set(xlabel="query-key distance m (tokens)", ylabel="score, Σ 2cos(mθ)", xlim=(-0.01 * stop, 1.02 * stop))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.locator_params(axis="x", nbins=7)


def _draw_pairs(axes: "Axes", study: Study, longest: float) -> None:
    """Cosines of three pretrained pairs, and of the slowest of them by method; more would hide each other."""
    pretrained = study.geometry.inv_freq()
    pairs, distances = _chosen_pairs(pretrained), np.linspace(0, longest, 2001)
    for pair, look in zip(pairs, _PAIR_LOOKS, strict=False):
        label = f"pretrained, pair {pair}: λ = {2 * math.pi / pretrained[pair]:.0f}"
        axes.plot(distances, 2 * np.cos(distances * pretrained[pair]), label=label, **look)
    for index, (name, rope) in enumerate(study.ropes.items()):
        if index and rope.remapping is None and pairs:
            slowed = 2 * np.cos(distances * rope.inv_freq[pairs[0]])
            axes.plot(distances, slowed, label=f"{clean(name)}, pair {pairs[0]}", **_decay_look(index, len(distances)))
    axes.set_title("single pairs", fontsize=9)
    axes.set(xlabel="query-key distance m (tokens)", ylabel="2cos(mθ)")
    axes.margins(x=0.005)
    axes.xaxis.set_major_formatter("{x:.0f}")
