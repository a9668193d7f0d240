"""The frequencies that were chosen over the pretrained ones, by pair, beside those of the method's own constants."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.errors import DataError, MethodError
from ropecli.report.plots import style
from ropecli.report.study.by_pair import banded_axis, chart_by_pair, draw_line, mark_level, pair_axis
from ropecli.report.tuned.course import method_of, names_of, subject
from ropecli.report.wording import clean
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import scale
from ropecli.theory.wavelengths import turns
from ropecli.tune.record import TuneReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_INSTEAD = "yarn"
"""Whose constants stand beside those of a method that has none of its own, as longrope."""
_MOST_FACTORS = 4
_LARGEST_BASE = 1e30
_Y_LABEL = "frequency over the pretrained one"


@dataclass(frozen=True)
class _Line:
    """ratio: shape (rotary_dim/2,), NaN where the pretrained frequency is 0."""

    name: str
    ratio: np.ndarray


def figure(reports: Sequence[TuneReport]) -> "Figure":
    """Raises DataError for more lines than look different, and where no pair turned in pretraining."""
    lines, levels, border = _lines(reports), _levels(reports), _border(reports)
    others = [name for _, name in (*levels, *border)]
    with style.drawing():
        drawn, axes = style.line_figure([line.name for line in lines], others)
        handles: list[Any] = []
        for index, line in enumerate(lines):
            above = np.where(line.ratio > 0, line.ratio, np.nan)
            handles.append(draw_line(axes, above, index, len(lines), line.name, hollow=np.isnan(above)))
        handles += [mark_level(axes, y, name, (6, 3) if y == 1 else (2, 2)) for y, name in levels]
        handles += [
            axes.axvline(x, color=style.GREY, linewidth=1, linestyle="-.", label=name, zorder=1) for x, name in border
        ]
        pair_axis(axes, max(len(line.ratio) for line in lines))
        values = [float(one) for line in lines for one in line.ratio if one > 0]
        zeros = [line.ratio == 0 for line in lines]
        banded_axis(axes, [*values, *(y for y, _ in levels)], zeros, "0")
        axes.set_ylabel(f"{_Y_LABEL}, logarithmic")
        style.legend(axes, handles, [*(line.name for line in lines), *others])
        style.title(drawn, _title(reports), _notes(reports))
    return drawn


def chart(reports: Sequence[TuneReport]) -> "RenderableType":
    """Raises DataError where no pair turned in pretraining."""
    return chart_by_pair(
        _title(reports),
        _Y_LABEL,
        [(line.name, line.ratio) for line in _lines(reports)],
        shown="{:.4g}".format,
        marks=_border(reports),
        levels=_levels(reports),
        notes=_notes(reports),
    )


def _lines(reports: Sequence[TuneReport]) -> list[_Line]:
    """The chosen ones of each run, then the methods' own, those of one name and rope once."""
    chosen = [_Line(name, _ratio(report)) for name, report in zip(names_of(reports), reports, strict=True)]
    own: list[_Line] = []
    for report in reports:
        line = _untuned(report)
        if line and not any(line.name == one.name and np.array_equal(line.ratio, one.ratio) for one in own):
            own.append(line)
    return [*chosen, *own]


def _ratio(report: TuneReport) -> np.ndarray:
    if not any(report.pretrained_inv_freq):
        raise DataError(
            f"No pair of {clean(report.checkpoint)} turned in pretraining, so that no frequency is a multiple of the "
            "pretrained one. Leave its report out."
        )
    return _over(np.array(report.inv_freq), np.array(report.pretrained_inv_freq))


def _over(inv_freq: np.ndarray, pretrained: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(pretrained > 0, inv_freq / pretrained, np.nan)


def _untuned(report: TuneReport) -> _Line | None:
    """By the constants that the method has of its own; None where the pretrained frequencies are no plain ones."""
    geometry = _geometry(report)
    if geometry is None:
        return None
    for method in dict.fromkeys((report.method, _INSTEAD)):
        try:
            scaled = scale(geometry, ScalingSpec(method, report.factor))
        except MethodError:  # as abf and longrope, which have no constants of their own
            continue
        return _Line(f"{method} ×{report.factor:g}, nothing tuned", _over(scaled.inv_freq, geometry.inv_freq()))
    return None


def _geometry(report: TuneReport) -> RopeGeometry | None:
    """With the base that the pretrained frequencies are powers of; None where they are of no base."""
    pretrained = np.array(report.pretrained_inv_freq)
    pairs, still = len(pretrained), int((pretrained == 0).sum())
    if pairs - still < 2:
        return None
    with np.errstate(over="ignore", divide="ignore"):
        base = float(pretrained[1] ** -float(pairs)) if pretrained[1] > 0 else np.inf
    if not 1 < base < _LARGEST_BASE:
        return None
    geometry = RopeGeometry(2 * pairs, 2 * pairs, base, report.original_max_position_embeddings, still_pairs=still)
    return geometry if np.allclose(geometry.inv_freq(), pretrained, rtol=1e-4, atol=0) else None


def _levels(reports: Sequence[TuneReport]) -> list[tuple[float, str]]:
    """1, and 1/s for each factor s."""
    factors = sorted({report.factor for report in reports} - {1.0})
    marked = factors if len(factors) <= _MOST_FACTORS else []
    return [
        (1.0, "as pretrained: 1"),
        *((1 / factor, f"1/s at factor {factor:g}: {1 / factor:.4g}") for factor in marked),
    ]


def _border(reports: Sequence[TuneReport]) -> list[tuple[float, str]]:
    """After the last pair that turns inside the pretraining window, where it is the same for all."""
    found = {_turning(report) for report in reports}
    if len(found) > 1:
        return []
    (turning, pairs) = found.pop()
    if turning in (0, pairs):
        return []
    last = f"pairs 0 to {turning - 1} complete" if turning > 1 else "pair 0 completes"
    return [(turning - 0.5, f"{last} a turn inside the pretraining window")]


def _turning(report: TuneReport) -> tuple[int, int]:
    """(how many pairs complete a turn inside the pretraining window, of how many)."""
    window = report.original_max_position_embeddings
    return int((turns(np.array(report.pretrained_inv_freq), window) >= 1).sum()), len(report.pretrained_inv_freq)


def _title(reports: Sequence[TuneReport]) -> str:
    which = method_of(reports[0]) if len(reports) == 1 else f"{len(reports)} tuning runs"
    return f"Frequency of each pair over the pretrained one, chosen by tuning, {which}: {subject(reports)}"


def _notes(reports: Sequence[TuneReport]) -> list[str]:
    notes = []
    for report in reports:
        zeros = int(((np.array(report.inv_freq) == 0) & (np.array(report.pretrained_inv_freq) > 0)).sum())
        still = int((np.array(report.pretrained_inv_freq) == 0).sum())
        if zeros:
            notes.append(f"{zeros} of {len(report.inv_freq)} pairs of {method_of(report)} do not turn, shown at 0")
        if still:
            notes.append(f"{still} pairs did not turn in pretraining, and have no frequency to be held against")
        if _untuned(report) is None:
            notes.append(f"{clean(report.checkpoint)} has no plain pretrained frequencies to set constants against")
    factors = "; ".join(
        dict.fromkeys(f"{method_of(one)}: attention factor {one.attention_factor:.4g}" for one in reports)
    )
    return [*dict.fromkeys(notes), factors]
