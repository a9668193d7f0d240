"""Draws theory: the frequency of each rotary pair relative to the pretrained one, and the score by distance.

Sources: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 3 (h(θ_d)/θ_d); Liu et al. 2023 (arXiv:2310.05209), section
4.1, for the critical dimension; "embedding and rope" (blog, 5 February 2025), for decay.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.analysis.score import FARTHEST_CHECKED, first_negative, score
from ropecli.analysis.wavelengths import critical_dimension
from ropecli.checkpoint.inspection import PRETRAINED, Study
from ropecli.errors import DataError
from ropecli.reporting.figures import style
from ropecli.scaling.spec import ScaledRope
from ropecli.table import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = 16
"""Maximum per line."""
_STRETCHES = 120
_SAMPLES = 512
"""Maximum distances evaluated in a stretch."""


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
        figure = style.new_figure(*style.line_size([*ratios, *levels, border]))
        axes = figure.subplots()
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
    """The score of each rope by distance up to the target, as means over stretches of adjacent distances."""
    width = math.ceil(study.target / _STRETCHES)
    remapped = [clean(name) for name, rope in study.ropes.items() if rope.remapping is not None]
    notes = [
        f"lines: mean over every {width} adjacent distances; attention factors are not included",
        f"at the remapped distances seen by the last token: {', '.join(remapped)}" if remapped else None,
    ]
    labels = [_decay_label(name, rope, study.target) for name, rope in study.ropes.items()]
    border = f"pretraining length ({study.original_length})"
    with style.drawing():
        figure = style.new_figure(*style.line_size([*labels, border]))
        axes = figure.subplots()
        for index, (label, rope) in enumerate(zip(labels, study.ropes.values(), strict=True)):
            middles, scores = _stretches(rope, width, study.target)
            every = max(1, len(middles) // 7)
            pretrained = {"color": "black", "linewidth": 1.8}
            # markers are few and offset between lines
            look = {**style.look(index), "markevery": (index * every // 7, every)} if index else pretrained
            axes.plot(middles, scores, label=label, **look)
        axes.axhline(0, color="black", linewidth=0.6)
        axes.axvline(study.original_length, color=style.GREY, linewidth=1.1, linestyle=(0, (6, 3)), label=border)
        axes.set(xlabel="query-key distance m (tokens)", ylabel="score, Σ 2cos(mθ)")
        axes.xaxis.set_major_formatter("{x:.0f}")
        style.legend(axes)
        subject = f"Attention score of an all-ones query and key by distance, {_subject(study)}"
        style.title(figure, subject, notes)
    return figure


def _decay_label(name: str, rope: ScaledRope, target: int) -> str:
    """The rope's name, with its first negative score unless it remaps distances."""
    if rope.remapping is not None:
        return clean(name)
    below = first_negative(rope.inv_freq, min(FARTHEST_CHECKED, target))
    return f"{clean(name)}: {f'first negative at {below}' if below else 'never negative in this range'}"


def _stretches(rope: ScaledRope, width: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the distances 0 to target - 1 into stretches: their middles and mean scores, masked where none is seen.

    Drawing every tenth point of a curve with a period of six tokens would show a false wave (aliasing). For a rope that
    remaps distances: the scores at the remapped distances that the last of `target` tokens sees.
    """
    starts = np.arange(0, target, width)[:, None]
    inside = np.arange(width)
    if width > _SAMPLES:  # random, because an even step could hide a pair
        inside = np.random.default_rng(0).integers(width, size=(len(starts), _SAMPLES))
    seen = (starts + inside).astype(np.float64)
    if rope.remapping is not None:
        keys = target - 1 - (starts + inside).ravel()
        seen = rope.remapping.distances(np.array([target - 1]), keys).reshape(seen.shape)
    return starts[:, 0] + (width - 1) / 2, np.ma.masked_invalid(score(rope.inv_freq, seen)).mean(axis=1)


STUDY_KINDS = {"decay": draw_decay, "frequencies": draw_frequencies}
"""Kinds that draw a checkpoint."""
DEFAULT_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "decay": {},
    "frequencies": {"linear": {}, "abf": {"beta": 50.0}, "ntk": {}, "yarn": {}, "llama3": {}, "p-rope": {}},
}
"""Methods, with parameters, that each kind compares with the checkpoint by default."""
