"""Tokens that each pair takes for a turn, as pretrained and by each method, against the windows.

Source: Peng et al. 2023 (YaRN, arXiv:2309.00071), section 2.3: pairs that turn inside the window have shown all their
angles in pretraining.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.checkpoint.study import Study
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
    turning_in_window,
)
from ropecli.report.wording import clean
from ropecli.rope import ScaledRope

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_Y_LABEL = "wavelength (tokens for a turn)"
_FILLED = "a whole turn inside the pretraining window (in brackets: how many pairs)"
_HOLLOW = "less than a turn in it"


def figure(study: Study) -> "Figure":
    """Raises DataError for more lines than look different."""
    names = [f"{clean(name)} ({_count(rope, study)})" for name, rope in study.ropes.items()]
    windows = _windows(study)
    others = [*(name for _, name in windows), _FILLED, _HOLLOW]
    with style.drawing():
        drawn, axes = style.line_figure(names, others)
        handles = [_draw(axes, study, index, name) for index, name in enumerate(names)]
        handles += [mark_level(axes, length, name, _dashes(name)) for length, name in windows]
        handles += [_key(filled=True), _key(filled=False)]
        pair_axis(axes, study.geometry.pairs)
        values = [float(length) for length, _ in windows]
        values += [float(one) for rope in study.ropes.values() for one in rope.wavelength if np.isfinite(one)]
        banded_axis(axes, values, list(_still(study).values()), "∞", upper=True)
        axes.set_ylabel(f"{_Y_LABEL}, logarithmic")
        style.legend(axes, handles, [*names, *others])
        style.title(drawn, _title(study), _notes(study, "∞"))
    return drawn


def chart(study: Study) -> "RenderableType":
    pairs = study.geometry.pairs
    names = [f"{name}, {_count(rope, study)} of {pairs} inside the window" for name, rope in study.ropes.items()]
    return chart_by_pair(
        _title(study),
        _Y_LABEL,
        zip(names, [rope.wavelength for rope in study.ropes.values()], strict=True),
        shown=lambda tokens: f"{tokens:.0f} tokens" if np.isfinite(tokens) else "no turn",
        levels=[(float(length), f"{name} tokens") for length, name in _windows(study)],
        notes=[
            "inside the window: pairs with a whole turn inside the pretraining window",
            *_notes(study, "the upper edge"),
        ],
    )


def _title(study: Study) -> str:
    return f"Wavelength of each pair, {subject(study)}"


def _notes(study: Study, edge: str) -> list[str]:
    return [*still_notes(_still(study), edge), *remapping_notes(study, "the wavelengths are the pretrained ones")]


def _still(study: Study) -> dict[str, np.ndarray]:
    """Of each rope, whether each pair stands still, shape (rotary_dim/2,)."""
    return {name: rope.inv_freq == 0 for name, rope in study.ropes.items()}


def _count(rope: ScaledRope, study: Study) -> int:
    return int(turning_in_window(rope.inv_freq, study).sum())


def _windows(study: Study) -> list[tuple[int, str]]:
    """Each length to mark, tokens, and its name: the larger first; one where they are the same."""
    if study.target == study.window:
        return [(study.window, f"pretraining window and target: {study.window}")]
    both = [(study.target, f"target: {study.target}"), (study.window, f"pretraining window: {study.window}")]
    return sorted(both, reverse=True)


def _draw(axes: "Axes", study: Study, index: int, label: str) -> Any:
    """Markers are filled where a pair turns inside the window."""
    rope = list(study.ropes.values())[index]
    lengths = np.where(rope.inv_freq > 0, rope.wavelength, np.nan)
    inside = turning_in_window(rope.inv_freq, study)
    return draw_line(axes, lengths, index, len(study.ropes), label, hollow=~inside)


def _dashes(name: str) -> tuple[int, int]:
    return (2, 2) if name.startswith("target") else (6, 3)


def _key(filled: bool) -> Any:
    """What a marker means, for the legend."""
    from matplotlib.lines import Line2D

    fill = style.GREY if filled else "white"
    return Line2D([], [], linestyle="none", marker="o", markersize=5, color=style.GREY, markerfacecolor=fill)
