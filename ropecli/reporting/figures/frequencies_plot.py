"""Draws a value per rotary pair: wavelengths, or frequencies relative to the pretrained ones, by method or tuned.

Sources: Peng et al. 2023 (YaRN, arXiv:2309.00071), sections 2.3 (pairs with a full rotation inside the pretraining
length have seen all their angles) and 3 (h(θ_d)/θ_d); Liu et al. 2023 (arXiv:2310.05209), section 4.1, for the
critical dimension.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ropecli.analysis.wavelengths import critical_dimension, rotations
from ropecli.checkpoint.inspection import PRETRAINED, Study
from ropecli.errors import DataError, MethodError
from ropecli.reporting.figures import style
from ropecli.reporting.tuning_tables import tuned_method, tuning_names, tuning_subject
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec
from ropecli.table import clean
from ropecli.tuning.task import TuneReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

X_LABEL = "rotary pair, fastest first"
_OVER_PRETRAINED = "frequency ÷ pretrained frequency, logarithmic"
_MARKERS = 16
"""Maximum per line."""
_BAND, _ROW = 0.08, 0.05
"""Fractions of a logarithmic axis: from its data to the first line at 0 or ∞, and from there to the next."""
_MAX_FACTORS = 4
"""Maximum lines at 1/s; more would look like a grid."""
_REFERENCE = "yarn"
"""Shown for comparison if the tuned method has no default constants, such as longrope."""


def draw_wavelengths(study: Study) -> "Figure":
    """Tokens per rotation of each pair, against the pretraining length and the target."""
    lines = {}
    for name, rope in study.ropes.items():
        inside = int((rotations(rope.inv_freq, study.original_length) >= 1).sum())
        lines[f"{clean(name)} ({inside})"] = np.where(rope.inv_freq > 0, rope.wavelength, np.inf)
    levels = {f"pretraining length: {study.original_length}": study.original_length}
    if study.target != study.original_length:
        levels[f"target: {study.target}"] = study.target
    notes = [
        "in brackets: number of pairs that complete a rotation inside the pretraining length",
        *_still_notes(study, "∞"),
        *remapping_notes(study, "wavelengths are the pretrained ones"),
    ]
    label = "wavelength (tokens per rotation), logarithmic"
    return _draw(f"Wavelength of each pair, {study_subject(study)}", label, lines, levels, {}, notes)


def draw_frequencies(study: Study) -> "Figure":
    """Frequency of each pair by method, relative to pretrained. Raises DataError if there is nothing to compare."""
    pretrained = study.geometry.inv_freq()
    methods = {clean(name): rope for name, rope in study.ropes.items() if name != PRETRAINED}
    if not methods:
        raise DataError(
            f"There is nothing to compare: {clean(study.checkpoint)} is unscaled. Give methods and a factor, for "
            "example --methods yarn --factor 4."
        )
    _refuse_no_frequency(study.checkpoint, pretrained)
    notes = [*_still_notes(study, "0"), *remapping_notes(study, "the line is at 1")]
    if study.geometry.still_pairs:
        first = study.geometry.pairs - study.geometry.still_pairs
        notes.append(f"pairs from {first} on did not rotate in pretraining and have no frequency to compare with")
    dimension = critical_dimension(study.geometry)
    rotating = study.geometry.pairs - study.geometry.still_pairs
    border = _border(dimension // 2, rotating, f"critical dimension {dimension}: ")
    if not border:
        notes.append(
            f"{'every rotating pair' if dimension else 'no pair'} completes a rotation inside the pretraining length"
        )
    return _draw(
        f"Frequency of each pair relative to pretrained, {study_subject(study)}",
        _OVER_PRETRAINED,
        {name: _over(rope.inv_freq, pretrained) for name, rope in methods.items()},
        _levels(rope.spec.factor for rope in methods.values() if rope.remapping is None),
        border,
        notes,
    )


def draw_tuned_frequencies(reports: Sequence[TuneReport]) -> "Figure":
    """Tuned frequencies relative to the pretrained ones, compared with the methods' default constants."""
    lines, notes = {}, []
    own: dict[str, np.ndarray] = {}
    for name, report in zip(tuning_names(reports), reports, strict=True):
        pretrained, chosen = np.array(report.pretrained_inv_freq), np.array(report.inv_freq)
        _refuse_no_frequency(report.checkpoint, pretrained)
        lines[name] = _over(chosen, pretrained)
        notes.append(f"{name}: attention factor {report.attention_factor:.4g}")
        own |= _untuned(report)
    pairs = {
        int((rotations(np.array(one.pretrained_inv_freq), one.original_max_position_embeddings) >= 1).sum())
        for one in reports
    }
    rotating = sum(one > 0 for one in reports[0].pretrained_inv_freq)
    which = tuned_method(reports[0]) if len(reports) == 1 else f"{len(reports)} tuning runs"
    return _draw(
        f"Tuned frequency of each pair relative to pretrained, {which}: {tuning_subject(reports)}",
        _OVER_PRETRAINED,
        {**lines, **own},
        _levels(report.factor for report in reports),
        _border(pairs.pop(), rotating) if len(pairs) == 1 else {},
        list(dict.fromkeys(notes)),
    )


def study_subject(study: Study) -> str:
    """The checkpoint and the geometry of its rotary embedding."""
    rope = study.geometry
    part = f" of head_dim {rope.head_dim}" if rope.rotary_dim != rope.head_dim else ""
    layers = f", {clean(rope.layer_type)} layers" if rope.layer_type else ""
    return (
        f"{clean(study.checkpoint)}{layers}: rotary_dim {rope.rotary_dim}{part}, rope_theta {rope.rope_theta:.10g}, "
        f"pretraining length {study.original_length}, target {study.target} tokens"
    )


def remapping_notes(study: Study, unchanged: str) -> list[str]:
    """A note on methods that change distances instead of frequencies. unchanged: the consequence for the plot."""
    names = [clean(name) for name, rope in study.ropes.items() if rope.remapping is not None]
    if not names:
        return []
    return [f"{', '.join(names)} change{'s'[: len(names) == 1]} distances, not frequencies: {unchanged}"]


def _still_notes(study: Study, edge: str) -> list[str]:
    """A note on pairs that do not rotate. edge: where the axis shows them."""
    still = [
        f"{int((rope.inv_freq == 0).sum())} of {len(rope.inv_freq)} ({clean(name)})"
        for name, rope in study.ropes.items()
        if (rope.inv_freq == 0).any()
    ]
    return [f"pairs that do not rotate, shown at {edge}: {', '.join(still)}"] if still else []


def _refuse_no_frequency(checkpoint: str, pretrained: np.ndarray) -> None:
    if not pretrained.any():
        raise DataError(
            f"No pair of {clean(checkpoint)} rotated in pretraining, so there is no frequency to compare with. "
            "Omit it, or use --kind wavelengths."
        )


def _over(inv_freq: np.ndarray, pretrained: np.ndarray) -> np.ndarray:
    """Ratio to the pretrained frequencies, NaN where those are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(pretrained > 0, inv_freq / pretrained, np.nan)


def _levels(factors: Iterable[float]) -> dict[str, float]:
    """1, and 1/s for each factor s."""
    distinct = sorted({*factors} - {1.0})
    marked = distinct if len(distinct) <= _MAX_FACTORS else []
    return {"as pretrained: 1": 1.0, **{f"1/s at factor {one:g}: {1 / one:.4g}": 1 / one for one in marked}}


def _border(inside: int, rotating: int, name: str = "") -> dict[str, float]:
    """A line between the pairs with a full rotation inside the pretraining length and the others, if there are both."""
    if inside in (0, rotating):
        return {}
    last = f"pairs 0 to {inside - 1} complete" if inside > 1 else "pair 0 completes"
    return {f"{name}{last} a rotation inside the pretraining length": inside - 0.5}


def _untuned(report: TuneReport) -> dict[str, np.ndarray]:
    """Frequencies with default constants; empty if the pretrained ones are not powers of a base."""
    pretrained = np.array(report.pretrained_inv_freq)
    pairs, still = len(pretrained), int((pretrained == 0).sum())
    if pairs - still < 2 or not 1e-30 < pretrained[1] ** pairs < 1:
        return {}
    base, original_length = float(pretrained[1] ** -float(pairs)), report.original_max_position_embeddings
    geometry = RopeGeometry(2 * pairs, 2 * pairs, base, original_length, still_pairs=still)
    if not np.allclose(geometry.inv_freq(), pretrained, rtol=1e-4, atol=0):
        return {}
    for method in (report.method, _REFERENCE):
        try:
            scaled = scale(geometry, make_spec(method, report.factor))
        except MethodError:  # abf and longrope have no default constants
            continue
        return {f"{method} ×{report.factor:g}, untuned": _over(scaled.inv_freq, geometry.inv_freq())}
    return {}


def _draw(
    title: str,
    y_label: str,
    lines: Mapping[str, np.ndarray],
    levels: Mapping[str, float],
    borders: Mapping[str, float],
    notes: Sequence[str],
) -> "Figure":
    """lines: by name, shape (pairs,), NaN for gaps. levels: horizontal lines. borders: vertical lines.

    0 and ∞ do not fit on a logarithmic axis and are drawn beyond its range.
    """
    from matplotlib.ticker import MaxNLocator

    finite = [one for values in lines.values() for one in values if 0 < one < math.inf] + list(levels.values())
    low, high = min(finite), max(finite)
    span = math.log10(high / low) or 1.0
    edge, places = "0", list[float]()
    with style.drawing():
        figure, (axes,) = style.line_figure(list(lines), [*levels, *borders])
        for index, (name, values) in enumerate(lines.items()):
            beyond = np.isinf(values) | (values == 0)
            every = math.ceil(max(len(values) / _MARKERS, min(len(lines), len(values) / 5)))
            # offset the markers, so that overlapping lines are visible
            look = {**style.look(index), "markevery": (index % every, every)}
            axes.plot(np.where(beyond, np.nan, values), label=name, **look)
            if beyond.any():
                edge = "∞" if np.isinf(values).any() else "0"
                away = 10 ** (span * (_BAND + _ROW * len(places)))
                places.append(high * away if edge == "∞" else low / away)
                axes.plot(
                    np.where(beyond, places[-1], np.nan), label=style.UNNAMED, **{**look, "markerfacecolor": "white"}
                )
        for dashes, (name, y) in zip(((6, 3), *[(2, 2)] * len(levels)), levels.items(), strict=False):
            axes.axhline(y, color=style.GREY, linewidth=1, linestyle=(0, dashes), label=name, zorder=1)
        for name, x in borders.items():
            axes.axvline(x, color=style.GREY, linewidth=1, linestyle="-.", label=name, zorder=1)
        style.log_axis(axes.yaxis, [*finite, *places])
        if places:
            ticks = [tick for tick in axes.get_yticks() if low / 1.01 <= tick <= high * 1.01]
            axes.set_yticks([*ticks, math.sqrt(places[0] * places[-1])], [*(f"{tick:.10g}" for tick in ticks), edge])
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 10]))
        axes.set(xlabel=X_LABEL, ylabel=y_label)
        style.legend(axes)
        style.title(figure, title, notes)
    return figure
