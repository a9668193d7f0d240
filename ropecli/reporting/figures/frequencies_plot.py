"""Draws the frequency of each rotary pair relative to the pretrained one, by method.

Sources: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 3 (h(θ_d)/θ_d); Liu et al. 2023 (arXiv:2310.05209), section
4.1, for the critical dimension.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropecli.analysis.wavelengths import critical_dimension
from ropecli.checkpoint.inspection import PRETRAINED, Study
from ropecli.errors import DataError
from ropecli.reporting.figures import style
from ropecli.table import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = 16
"""Maximum per line."""


def draw_frequencies(study: Study) -> "Figure":
    """Frequency of each pair by method, relative to pretrained. Raises DataError if there is nothing to compare."""
    geometry, pretrained = study.geometry, study.geometry.inv_freq()
    methods = {clean(name): rope for name, rope in study.ropes.items() if name != PRETRAINED}
    if not methods:
        raise DataError(
            f"There is nothing to compare: {clean(study.checkpoint)} is unscaled. Give methods and a factor, for "
            "example --methods yarn --factor 4."
        )
    if not pretrained.any():
        raise DataError(
            f"No pair of {clean(study.checkpoint)} rotated in pretraining, so there is no frequency to compare with."
        )
    notes = []
    if remapped := [name for name, rope in methods.items() if rope.remapping is not None]:
        verb = f"change{'s'[: len(remapped) == 1]}"
        notes.append(f"{', '.join(remapped)} {verb} distances, not frequencies: the line is at 1")
    if geometry.still_pairs:
        first = geometry.pairs - geometry.still_pairs
        notes.append(f"pairs from {first} on did not rotate in pretraining and have no frequency to compare with")
    dimension = critical_dimension(geometry)
    inside, rotating, borders = dimension // 2, geometry.pairs - geometry.still_pairs, {}
    if inside in (0, rotating):
        which = "every rotating pair" if dimension else "no pair"
        notes.append(f"{which} completes a rotation inside the pretraining length")
    else:
        last = f"pairs 0 to {inside - 1} complete" if inside > 1 else "pair 0 completes"
        words = f"critical dimension {dimension}: {last} a rotation inside the pretraining length"
        borders[words] = inside - 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = {name: np.where(pretrained > 0, rope.inv_freq / pretrained, np.nan) for name, rope in methods.items()}
    factors = sorted({rope.spec.factor for rope in methods.values() if rope.remapping is None} - {1.0})
    levels = {f"1/s at factor {factor:g}: {1 / factor:.4g}": 1 / factor for factor in factors}
    levels = {"as pretrained: 1": 1.0, **levels}
    part = f" of head_dim {geometry.head_dim}" if geometry.rotary_dim != geometry.head_dim else ""
    layers = f", {clean(geometry.layer_type)} layers" if geometry.layer_type else ""
    title = (
        f"Frequency of each pair relative to pretrained, {clean(study.checkpoint)}{layers}: rotary_dim "
        f"{geometry.rotary_dim}{part}, rope_theta {geometry.rope_theta:.10g}, pretraining length "
        f"{study.original_length}, target {study.target} tokens"
    )
    return _draw(title, ratios, levels, borders, notes)


def _draw(
    title: str,
    ratios: Mapping[str, np.ndarray],
    levels: Mapping[str, float],
    borders: Mapping[str, float],
    notes: Sequence[str],
) -> "Figure":
    """ratios: by method, shape (pairs,), NaN for gaps. levels: horizontal lines. borders: vertical lines."""
    from matplotlib.ticker import MaxNLocator

    still = [f"{int((ratio == 0).sum())} of {len(ratio)} ({name})" for name, ratio in ratios.items() if 0 in ratio]
    if still:
        notes = [f"not shown, pairs that do not rotate: {', '.join(still)}", *notes]
    with style.drawing():
        figure, (axes,) = style.line_figure(list(ratios), [*levels, *borders])
        for index, (name, values) in enumerate(ratios.items()):
            every = math.ceil(max(len(values) / _MARKERS, min(len(ratios), len(values) / 5)))
            # offset the markers, so that overlapping lines are visible
            look = {**style.look(index), "markevery": (index % every, every)}
            axes.plot(np.where(values == 0, np.nan, values), label=name, **look)
        for dashes, (name, y) in zip(((6, 3), *[(2, 2)] * len(levels)), levels.items(), strict=False):
            axes.axhline(y, color=style.GREY, linewidth=1, linestyle=(0, dashes), label=name, zorder=1)
        for name, x in borders.items():
            axes.axvline(x, color=style.GREY, linewidth=1, linestyle="-.", label=name, zorder=1)
        positive = [ratio for values in ratios.values() for ratio in values if ratio > 0]
        style.log_axis(axes.yaxis, [*positive, *levels.values()])
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 10]))
        axes.set(xlabel="rotary pair, fastest first", ylabel="frequency ÷ pretrained frequency, logarithmic")
        style.legend(axes)
        style.title(figure, title, notes)
    return figure
