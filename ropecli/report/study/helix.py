"""The embedding as a helix, a panel a rope: how far apart neighbouring positions lie.

Source: Xiong et al. 2023 (arXiv:2309.16039), appendix B, figure 8.
"""

import math
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ropecli.checkpoint.study import Study
from ropecli.errors import DataError
from ropecli.report.plots import style
from ropecli.report.study.by_pair import remapping_notes, subject
from ropecli.report.wording import clean
from ropecli.rope import RopeGeometry, ScaledRope
from ropecli.theory.images import helix

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

POSITIONS = np.arange(-5, 6)
"""Around 0, where the slower pair's sine rises: farther out it comes back, and dots would hide each other."""
MOST_PANELS = 8
_COLUMNS = 4
_SIDE, _WORDS, _TITLE, _NOTES, _NARROWEST = 3.3, 0.45, 0.75, 0.9, 7.0
"""Inches: of a panel, of what stands below it, of what stands above and below all; of a picture at least."""
_BETA = 50.0
"""Of the paper's ABF, which halves the frequency of the pair that its figure shows."""
_ACROSS, _UP = 36, 15
"""Columns and rows of a helix in the terminal."""
_LONGEST_LINE = 24 * math.pi
"""Radians of the fastest pair; of a slower pair that hardly turns the whole helix would be a solid tube."""


class Spacing(NamedTuple):
    """neighbours: from a dot to the next, the mean. closest: of any two dots. gap: tokens between those."""

    neighbours: float
    closest: float
    gap: int


def figure(study: Study) -> "Figure":
    """Raises DataError for more ropes than panels."""
    ropes = shown_ropes(study)
    pair = slower_pair(study.geometry)
    columns = min(_COLUMNS, len(ropes))
    rows = math.ceil(len(ropes) / columns)
    width, height = max(_NARROWEST, _SIDE * columns), _TITLE + _NOTES + (_SIDE + _WORDS) * rows
    with style.drawing():
        figure = style.new_figure(width, height)
        figure.set_layout_engine("none")  # which knows no labels of axes in space
        left = (width - _SIDE * columns) / 2
        for index, (name, rope) in enumerate(ropes.items()):
            row, column = divmod(index, columns)
            place = left + _SIDE * column, height - _TITLE - (_SIDE + _WORDS) * (row + 1) + _WORDS
            sides = place[0] / width, place[1] / height, _SIDE / width, _SIDE / height
            _draw(figure.add_axes(sides, projection="3d"), clean(name), rope, pair)
        style.title(figure, _title(study), _notes(study, pair))
    return figure


def slower_pair(geometry: RopeGeometry) -> int:
    """The one whose frequency ABF with beta = 50 halves, beta^(-2j/d) = 1/2; not the fastest where there are others."""
    nearest = round(geometry.pairs * math.log(2) / math.log(_BETA))
    return min(max(1, nearest), geometry.pairs - 1)


def shown_ropes(study: Study) -> dict[str, ScaledRope]:
    """Those whose images differ from the pretrained ones. Raises DataError for more than there are panels."""
    ropes = {name: rope for name, rope in study.ropes.items() if rope.remapping is None}
    if len(ropes) > MOST_PANELS:
        raise DataError(
            f"{len(ropes)} helices are too many for one picture, which holds {MOST_PANELS}, the pretrained one among "
            f"them. Name up to {MOST_PANELS - 1} methods with --method; --kind tradeoff compares more."
        )
    return ropes


def spacing(rope: ScaledRope, pair: int) -> Spacing:
    dots = helix(rope.inv_freq, pair, POSITIONS)
    apart = np.linalg.norm(dots[:, None] - dots[None], axis=-1)
    of_gaps = [float(np.diagonal(apart, gap).min()) for gap in range(1, len(dots))]
    gap = int(np.argmin(np.round(of_gaps, 9)))
    return Spacing(float(np.diagonal(apart, 1).mean()), of_gaps[gap], gap + 1)


def chart(study: Study) -> "RenderableType":
    """The helices from the side, as characters. Raises DataError as `figure`."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.text import Text

    ropes, pair = shown_ropes(study), slower_pair(study.geometry)
    panels = Columns([_from_the_side(name, rope, pair) for name, rope in ropes.items()])
    letters = f"{ascii_lowercase[0]} to {ascii_lowercase[len(POSITIONS) - 1]}"
    axes = f"from the side: across the sine of the fastest pair, up that of pair {pair}; {letters}: the dots in turn"
    return Group(Text(_title(study), "bold"), panels, *(Text(f"{note}.") for note in (axes, *_notes(study, pair))))


def _draw(axes: Any, name: str, rope: ScaledRope, pair: int) -> None:
    """The whole helix where it is not too long, darker where the dots lie."""
    whole = _whole(rope, pair)
    for end, look in ((whole, {"color": "#BBBBBB", "linewidth": 0.8}), (POSITIONS[-1], {"color": "black"})):
        axes.plot(*helix(rope.inv_freq, pair, np.linspace(-end, end, 1201)).T, **{"linewidth": 1.2, **look})
    dots = helix(rope.inv_freq, pair, POSITIONS)
    axes.plot(*dots.T, linestyle="", marker="o", markersize=5, color="#D55E00", markeredgecolor="black", mew=0.6)
    # where the axes meet there is room for one number
    axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1), xticks=(-1, 0, 1), yticks=(0,), zticks=(-1, 0, 1))
    axes.tick_params(labelsize=7, pad=-2)
    axes.set_xlabel("cos θ₀t", labelpad=-2, fontsize=8)
    axes.set_ylabel("sin θ₀t", labelpad=3, fontsize=8)
    axes.set_zlabel(f"sin θ{_below(pair)}t", labelpad=-8, fontsize=8)
    axes.view_init(elev=22, azim=-60)
    axes.set_box_aspect((1, 1, 1), zoom=0.88)
    axes.set_title(name, fontsize=10, y=0.98)
    axes.text2D(0.5, 0.0, _in_words(spacing(rope, pair)), transform=axes.transAxes, ha="center", va="top", fontsize=8.5)


def _whole(rope: ScaledRope, pair: int) -> float:
    """Tokens either side of 0 in which the slower pair's sine goes from -1 to 1, or what is drawn of them."""
    fast, slow = float(rope.inv_freq[0]), float(rope.inv_freq[pair])
    longest = _LONGEST_LINE / fast if fast else 0.0
    return max(float(POSITIONS[-1]), min(math.pi / 2 / slow if slow else longest, longest))


def _below(number: int) -> str:
    """As a subscript."""
    return "".join(chr(ord("₀") + int(digit)) for digit in f"{number}")


def _in_words(spacing: Spacing) -> str:
    closest = "neighbours" if spacing.gap == 1 else f"{spacing.gap} positions apart"
    return f"from dot to dot {spacing.neighbours:.2f}\nclosest two {spacing.closest:.2f} ({closest})"


def _title(study: Study) -> str:
    return f"The embedding as a helix, {subject(study)}"


def _notes(study: Study, pair: int) -> list[str]:
    ratio = _BETA ** (-pair / study.geometry.pairs)
    chosen = f"pair {pair} is the one whose frequency abf with beta = {_BETA:g} takes nearest to half (×{ratio:.2f})"
    if study.geometry.pairs <= 2:
        chosen = f"pair {pair} is the slowest"
    return [
        f"dots: positions t from {POSITIONS[0]} to {POSITIONS[-1]}, apart by their straight distance in these three "
        f"dimensions; {chosen}",
        *remapping_notes(study, "the helix is the pretrained one"),
    ]


def _from_the_side(name: str, rope: ScaledRope, pair: int) -> "RenderableType":
    """Letters where the dots lie, a for the first; + where several fall into one place."""
    from rich.panel import Panel
    from rich.text import Text

    cells = [[" "] * _ACROSS for _ in range(_UP)]
    for letter, (_, across, up) in zip(ascii_lowercase, helix(rope.inv_freq, pair, POSITIONS), strict=False):
        row, column = round((1 - up) / 2 * (_UP - 1)), round((1 + across) / 2 * (_ACROSS - 1))
        cells[row][column] = letter if cells[row][column] == " " else "+"
    view = "\n".join("".join(row) for row in cells)
    return Panel(
        Text(f"{view}\n{_in_words(spacing(rope, pair))}", no_wrap=True),
        title=Text(clean(name, _ACROSS)),
        width=_ACROSS + 4,
    )
