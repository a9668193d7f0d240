"""Names beside points, some of which may lie on each other: where there is no room, farther off, with a line."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ropecli.errors import DataError
from ropecli.report.plots import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = 8.5
"""Of a name, points."""
_CLEAR = 7.0
"""Points from a point's middle to what is no part of it."""
_SAME = 2.0
"""Points nearer to each other than so many points are one place."""
_WIDEST = 44
"""Letters in a line."""
_NEAR = 2 * _CLEAR
"""Up to here a name needs no line, unless it might be another point's."""
_STEP, _STEPS = 6.0, 60
_AROUND = 24
"""Directions in which a name may stand."""


class _Box(NamedTuple):
    """Its middle, width and height, points."""

    x: float
    y: float
    width: float
    height: float

    def meets(self, other: "_Box") -> bool:
        across, up = abs(self.x - other.x), abs(self.y - other.y)
        return 2 * across < self.width + other.width and 2 * up < self.height + other.height

    def distance(self, point: "_Box") -> float:
        """From the edge to the middle of a point outside."""
        across = max(0.0, abs(self.x - point.x) - self.width / 2)
        return math.hypot(across, max(0.0, abs(self.y - point.y) - self.height / 2))

    def inside(self, other: "_Box") -> bool:
        across, up = abs(self.x - other.x), abs(self.y - other.y)
        return 2 * across < other.width - self.width and 2 * up < other.height - self.height


def name_points(figure: "Figure", axes: "Axes", points: Mapping[str, tuple[float, float]]) -> None:
    """Of axes that are finished otherwise: the names' places hold for their size. Those of one place stand together.

    points: by name, in the units of the axes. Raises DataError where there are too many to be named.
    """
    figure.draw_without_rendering()  # only now the axes have their size
    unit = 72 / figure.dpi
    frame = axes.get_window_extent()
    (left, low), (right, high) = frame.p0 * unit, frame.p1 * unit
    room = _Box(float(left + right) / 2, float(low + high) / 2, float(right - left), float(high - low))
    named: dict[_Box, list[str]] = {}
    for name, point in points.items():
        x, y = axes.transData.transform(point) * unit
        same = next((dot for dot in named if math.hypot(dot.x - x, dot.y - y) < _SAME), None)
        named.setdefault(same or _Box(float(x), float(y), 2 * _CLEAR, 2 * _CLEAR), []).append(name)
    placed: list[_Box] = []
    for dot, names in named.items():
        words = style.wrap(", ".join(names), _WIDEST)
        box = _find_place(words, dot, room, placed, list(named))
        placed.append(box)
        near = box.distance(dot) < _NEAR
        axes.annotate(
            words,
            points[names[0]],
            xytext=(box.x - dot.x, box.y - dot.y),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=_SIZE,
            arrowprops=None if near else {"arrowstyle": "-", "color": style.GREY, "linewidth": 0.7, "shrinkB": 5},
        ).set_in_layout(False)


def _find_place(words: str, dot: _Box, room: _Box, placed: Sequence[_Box], dots: Sequence[_Box]) -> _Box:
    """The nearest one whose words and line cover nothing; where there is none, the nearest whose words do not."""
    width = 72 * style.LETTER * _SIZE * (style.widest([words]) + 1)
    height = 1.5 * _SIZE * (words.count("\n") + 1)
    others = [*placed, *(other for other in dots if not other.meets(dot))]
    free = [
        box
        for box in _places(dot, width, height)
        if box.inside(room) and not any(box.meets(other) for other in (*placed, *dots)) and _is_plain(box, dot, dots)
    ]
    if not free:
        raise DataError(
            f"{len(dots)} points are too many to be named in one picture. Name fewer methods with --method."
        )
    clear = (box for box in free if not any(step.meets(other) for step in _line(dot, box) for other in others))
    return next(clear, free[0])


def _is_plain(box: _Box, dot: _Box, dots: Sequence[_Box]) -> bool:
    """Whether a name there is taken for no other point's: it has a line, or the others are clearly farther from it."""
    own = box.distance(dot)
    return own >= _NEAR or all(box.distance(other) > 1.25 * own for other in dots if other != dot)


def _places(dot: _Box, width: float, height: float) -> Iterator[_Box]:
    """Around the dot, farther and farther off."""
    for step in range(_STEPS):
        for direction in range(_AROUND):
            angle, away = 2 * math.pi * direction / _AROUND, _CLEAR + _STEP * step
            x = dot.x + math.cos(angle) * (away + width / 2)
            y = dot.y + math.sin(angle) * (away + height / 2)
            yield _Box(x, y, width, height)


def _line(dot: _Box, box: _Box) -> Iterator[_Box]:
    """From the dot to the name, in pieces; matplotlib draws it to the middle of the name's box and cuts it there."""
    length = math.hypot(box.x - dot.x, box.y - dot.y)
    for step in range(int(length / _STEP)):
        share = step * _STEP / length
        yield _Box(dot.x + share * (box.x - dot.x), dot.y + share * (box.y - dot.y), 2.0, 2.0)
