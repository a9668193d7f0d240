"""Draws the frequency of each rotary pair relative to the pretrained one, by method.

Sources: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 3 (h(θ_d)/θ_d); Liu et al. 2023 (arXiv:2310.05209), section
4.1, for the critical dimension.
"""

import math
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
        layers = f", {clean(geometry.layer_type)} layers" if geometry.layer_type else ""
        subject = f"{clean(study.checkpoint)}{layers}: rotary_dim {geometry.rotary_dim}"
        lengths = f"pretraining length {study.original_length}, target {study.target} tokens"
        title = f"Frequency of each pair relative to pretrained, {subject}, rope_theta {geometry.rope_theta:.10g}"
        style.title(figure, f"{title}, {lengths}", notes)
    return figure
