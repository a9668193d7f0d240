"""Each pair's frequency by each method over the pretrained one: which pairs a method slows down, and by how much.

Source: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 3: h(θ_d)/θ_d. Liu et al. 2023 (arXiv:2310.05209), section
4.1, for the critical dimension.
"""

from typing import TYPE_CHECKING

import numpy as np

from ropecli.checkpoint.study import PRETRAINED, Study
from ropecli.errors import DataError
from ropecli.report.plots import style
from ropecli.report.study.by_pair import (
    banded_axis,
    chart_by_pair,
    draw_line,
    mark_level,
    pair_axis,
    remapping_notes,
    still_notes,
    subject,
)
from ropecli.report.wording import clean
from ropecli.theory.wavelengths import critical_dimension

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_Y_LABEL = "frequency over the pretrained one"
_MOST_FACTORS = 4
"""Of more, the lines at 1/s would be taken for a grid."""


def figure(study: Study) -> "Figure":
    """Raises DataError for nothing to compare, or more lines than look different."""
    ratios = _ratios(study)
    names, levels, border = [clean(name) for name in ratios], _levels(study), _border(study)
    others = [name for _, name in (*levels, *border)]
    with style.drawing():
        drawn, axes = style.line_figure(names, others)
        handles = []
        for index, (name, ratio) in enumerate(zip(names, ratios.values(), strict=True)):
            above = np.where(ratio > 0, ratio, np.nan)
            handles.append(draw_line(axes, above, index, len(names), name, hollow=np.isnan(above)))
        handles += [mark_level(axes, y, name, (6, 3) if y == 1 else (2, 2)) for y, name in levels]
        handles += [
            axes.axvline(x, color=style.GREY, linewidth=1, linestyle="-.", label=name, zorder=1) for x, name in border
        ]
        pair_axis(axes, study.geometry.pairs)
        values = [float(one) for ratio in ratios.values() for one in ratio if one > 0]
        zeros = [ratio == 0 for ratio in ratios.values()]
        banded_axis(axes, [*values, *(y for y, _ in levels)], zeros, "0")
        axes.set_ylabel(f"{_Y_LABEL}, logarithmic")
        style.legend(axes, handles, [*names, *others])
        style.title(drawn, _title(study), _notes(study))
    return drawn


def chart(study: Study) -> "RenderableType":
    """Raises DataError for nothing to compare."""
    return chart_by_pair(
        _title(study),
        _Y_LABEL,
        _ratios(study).items(),
        shown="{:.4g}".format,
        marks=_border(study),
        levels=_levels(study),
        notes=_notes(study),
    )


def _ratios(study: Study) -> dict[str, np.ndarray]:
    """By method, shape (rotary_dim/2,); NaN where the pretrained frequency is 0. Raises DataError for none."""
    pretrained = study.geometry.inv_freq()
    methods = {name: rope for name, rope in study.ropes.items() if name != PRETRAINED}
    if not methods:
        raise DataError(
            f"There is nothing to compare: {clean(study.checkpoint)} turns as it was pretrained. Give --method, for "
            "instance yarn, and --factor."
        )
    if not pretrained.any():
        raise DataError(
            f"No pair of {clean(study.checkpoint)} turned in pretraining, so that no frequency is a multiple of the "
            "pretrained one. Use --kind wavelengths."
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: np.where(pretrained > 0, rope.inv_freq / pretrained, np.nan) for name, rope in methods.items()}


def _title(study: Study) -> str:
    return f"Frequency of each pair over the pretrained one, {subject(study)}"


def _notes(study: Study) -> list[str]:
    notes = [
        *still_notes({name: ratio == 0 for name, ratio in _ratios(study).items()}, "0"),
        *remapping_notes(study, "the line stands at 1"),
    ]
    if study.geometry.still_pairs:
        first = study.geometry.pairs - study.geometry.still_pairs
        notes.append(f"pairs from {first} on did not turn in pretraining, and have no frequency to be held against")
    if len(_factors(study)) > _MOST_FACTORS:
        notes.append(f"1/s is not marked for more than {_MOST_FACTORS} factors s")
    if not _border(study):
        which = "every pair that turns" if critical_dimension(study.geometry) else "no pair"
        notes.append(f"{which} completes a turn inside the pretraining window")
    return notes


def _factors(study: Study) -> list[float]:
    """Those of methods that change frequencies, ascending."""
    return sorted({rope.spec.factor for rope in study.ropes.values() if rope.remapping is None} - {1.0})


def _levels(study: Study) -> list[tuple[float, str]]:
    """1, and 1/s for each factor s."""
    factors = _factors(study)
    marked = factors if len(factors) <= _MOST_FACTORS else []
    return [
        (1.0, "as pretrained: 1"),
        *((1 / factor, f"1/s at factor {factor:g}: {1 / factor:.4g}") for factor in marked),
    ]


def _border(study: Study) -> list[tuple[float, str]]:
    """Between the last pair that turns inside the pretraining window and the first that does not, where both are."""
    dimension = critical_dimension(study.geometry)
    turning = dimension // 2
    if turning in (0, study.geometry.pairs - study.geometry.still_pairs):
        return []
    last = f"pairs 0 to {turning - 1} turn" if turning > 1 else "pair 0 turns"
    return [(turning - 0.5, f"critical dimension {dimension}: {last} inside the pretraining window")]
