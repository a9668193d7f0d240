"""Lines as characters for the terminal: a letter at each point, so that colours are not needed; plain ASCII where the
terminal has no more. Both axes may be logarithmic.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from string import ascii_letters

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from ropecli.report.ticks import even_numbers, round_numbers, share, with_room
from ropecli.report.wording import clean, told_apart

_HEIGHT = 18
_WIDEST = 110
_NARROWEST = 24
_MARGIN = 5
"""Columns right of the last point, for letters that would lie on each other."""
_APART = 14
"""Columns from one letter of a dense line to its next."""
_EDGE = 2
"""Rows that a value without a place on the axis takes of it: its own, and an empty one."""
_TICK = 8
"""Columns that a number on the x axis takes, with what parts it from the next."""
_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")


@dataclass(frozen=True)
class Series:
    """points: (x, y), ascending in x, and x above 0 where its axis is logarithmic.

    At least one y is a number; NaN is a gap. An infinite one stands at the upper edge, a 0 on a logarithmic axis at
    the lower one, each apart from the numbers. dense: a line of dots with a letter here and there and at its end, not
    one at each point.
    """

    name: str
    points: list[tuple[float, float]]
    dense: bool = False


@dataclass(frozen=True)
class Chart:
    """A y axis, an x axis, lines or single points (a series of one), and what is said of them below.

    logarithmic: the y axis. shown: a y value in words. x_logarithmic, shown_x: the same of x. x_ticks: where the x
    axis has its numbers; at round ones where none are given. marks: vertical lines, each its x and what it is, in
    words. levels: horizontal ones, each its y and what it is. notes: lines below.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    logarithmic: bool
    shown: Callable[[float], str]
    x_logarithmic: bool = True
    shown_x: Callable[[float], str] = "{:.0f}".format
    x_ticks: Sequence[float] = ()
    marks: Sequence[tuple[float, str]] = ()
    levels: Sequence[tuple[float, str]] = ()
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        drawing = _Drawing(self, min(options.max_width, _WIDEST), options.ascii_only)
        yield Text(clean(self.title, 400), "bold")
        yield Text(f"{self.y_label}{', logarithmic' if self.logarithmic else ''}")
        yield from drawing.lines()
        yield Text(" " * (drawing.left + 1) + self.x_label)
        for letter, style, series in zip(
            _letters(len(self.series)), _styles(len(self.series)), self.series, strict=True
        ):
            x, y = [point for point in series.points if not math.isnan(point[1])][-1]
            yield Text.assemble(
                (letter, f"bold {style}"), f"  {clean(series.name)}: {self.shown(y)} at {self.shown_x(x)}"
            )
        for _, words in self.marks:
            yield Text(f"{drawing.mark}  {words}")
        for _, words in self.levels:
            yield Text(f"{drawing.level}  {words}")
        for note in self.notes:
            yield Text(note)


def _letters(count: int) -> str:
    return "".join(ascii_letters[index % len(ascii_letters)] for index in range(count))


def _styles(count: int) -> list[str]:
    return [_STYLES[index % len(_STYLES)] for index in range(count)]


class _Drawing:
    """A chart on a grid of characters, each with its style."""

    def __init__(self, chart: Chart, width: int, ascii_only: bool) -> None:
        self.chart = chart
        self.dot, self.wall, self.floor, self.tick, self.mark, self.level = ".|-+:-" if ascii_only else "·│─┼┊┈"
        points = [point for series in chart.series for point in series.points if not math.isnan(point[1])]
        ys = [y for _, y in points if self._has_place(y)] + [y for y, _ in chart.levels]
        self.y_low, self.y_high = _spread(min(ys, default=1.0), max(ys, default=1.0), chart.logarithmic)
        # the rows of the largest and of the smallest number
        self.upper = _EDGE if any(y == math.inf for _, y in points) else 0
        self.lower = _HEIGHT - 1 - (_EDGE if chart.logarithmic and any(y == 0 for _, y in points) else 0)
        xs = [x for x, _ in (*chart.marks, *points)]
        self.x_low, self.x_high = _spread(min(xs), max(xs), False)
        if chart.x_logarithmic:
            self.x_low, self.x_high = min(xs), max(max(xs), 2 * min(xs))
        self.y_ticks = self._y_ticks("inf" if ascii_only else "∞")
        self.left = max(map(len, self.y_ticks.values()), default=0) + 1
        self.columns = max(_NARROWEST, width - self.left - 1)
        self.width = self.left + 1 + self.columns
        self.cells = [[(" ", "")] * self.columns for _ in range(_HEIGHT)]

    def _has_place(self, y: float) -> bool:
        return math.isfinite(y) and not (self.chart.logarithmic and y == 0)

    def _y_ticks(self, infinity: str) -> dict[int, str]:
        """Each row's number."""
        numbers = round_numbers if self.chart.logarithmic else even_numbers
        ticks = numbers(self.y_low, self.y_high, 6)
        edges = {0: infinity} if self.upper > 0 else {}
        if self.lower < _HEIGHT - 1:
            edges[_HEIGHT - 1] = "0"
        return {**{self.row(tick): name for tick, name in zip(ticks, told_apart(ticks), strict=True)}, **edges}

    def row(self, y: float) -> int:
        if not self._has_place(y):
            return 0 if y == math.inf else _HEIGHT - 1
        from_above = 1 - share(y, self.y_low, self.y_high, self.chart.logarithmic)
        return round(self.upper + from_above * (self.lower - self.upper))

    def column(self, x: float) -> int:
        return round(share(x, self.x_low, self.x_high, self.chart.x_logarithmic) * (self.columns - 1 - _MARGIN))

    def lines(self) -> Iterable[Text]:
        for y, _ in self.chart.levels:
            self.cells[self.row(y)] = [(self.level, "dim")] * self.columns
        for x, _ in self.chart.marks:
            for row in range(_HEIGHT):
                self.cells[row][self.column(x)] = (self.mark, "dim")
        styles = _styles(len(self.chart.series))
        for series, style in zip(self.chart.series, styles, strict=True):
            self._draw_path(series, style)
        for index, (letter, style) in enumerate(zip(_letters(len(styles)), styles, strict=True)):
            for x, y in self._lettered(index):
                self._place(self.row(y), self.column(x), letter, f"bold {style}")
        for row, cells in enumerate(self.cells):
            number = self.y_ticks.get(row, "")
            yield Text.assemble(
                f"{number:>{self.left}}", self.tick if number else self.wall, *cells, no_wrap=True, end="\n"
            )
        yield from self._x_axis()

    def _draw_path(self, series: Series, style: str) -> None:
        for (x0, y0), (x1, y1) in zip(series.points, series.points[1:], strict=False):
            if math.isnan(y0 + y1) or self._has_place(y0) != self._has_place(y1):
                continue
            first, last = self.column(x0), self.column(x1)
            rows = self.row(y0), self.row(y1)
            for column in range(first + 1, last):
                self._dot(round(rows[0] + (rows[1] - rows[0]) * (column - first) / (last - first)), column, style)
        for x, y in series.points if series.dense else ():
            if not math.isnan(y):
                self._dot(self.row(y), self.column(x), style)

    def _dot(self, row: int, column: int, style: str) -> None:
        if self.cells[row][column][0] in (" ", self.mark, self.level):
            self.cells[row][column] = (self.dot, style)

    def _lettered(self, index: int) -> list[tuple[float, float]]:
        """The points of a series that get its letter: of dense ones not at the same columns as of the others."""
        series = self.chart.series[index]
        points = [point for point in series.points if not math.isnan(point[1])]
        if not series.dense:
            return points
        offset = _APART - index * _APART // len(self.chart.series)
        parts = [(self.column(x) + offset) // _APART for x, _ in points]
        found = [point for point, before, part in zip(points[1:], parts, parts[1:], strict=False) if part > before]
        # not two letters where the line ends
        clear = self.column(points[-1][0]) - _MARGIN
        return [point for point in found if self.column(point[0]) < clear] + points[-1:]

    def _place(self, row: int, column: int, letter: str, style: str) -> None:
        """Where another letter stands already, the next place on the right; a + where there is no more room."""
        for at in range(column, min(column + _MARGIN, self.columns)):
            if not (self.cells[row][at][0].isalpha() or self.cells[row][at][0] == "+"):
                self.cells[row][at] = (letter, style)
                return
        self.cells[row][min(column + _MARGIN, self.columns) - 1] = ("+", "bold")

    def _x_ticks(self) -> list[float]:
        if self.chart.x_ticks:
            return [tick for tick in self.chart.x_ticks if self.x_low <= tick <= self.x_high]
        numbers = round_numbers if self.chart.x_logarithmic else even_numbers
        return numbers(self.x_low, self.x_high, self.columns // _TICK)

    def _x_axis(self) -> Iterable[Text]:
        axis, numbers = [self.floor] * self.columns, [" "] * (self.width + 8)
        names = {tick: f"{tick:.10g}" for tick in self._x_ticks()}
        for tick in names:
            axis[self.column(tick)] = self.tick
        for tick in with_room(list(names), self.column, lambda tick: len(names[tick]) + 2):
            start = max(0, self.left + 1 + self.column(tick) - len(names[tick]) // 2)
            if start + len(names[tick]) <= self.width:
                numbers[start : start + len(names[tick])] = names[tick]
        yield Text(" " * self.left + self.tick + "".join(axis), no_wrap=True)
        yield Text("".join(numbers).rstrip(), no_wrap=True)


def _spread(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    """Never of no width."""
    if high > low * (1 + 1e-9):
        return low, high
    return (low / 1.1, high * 1.1) if logarithmic else (low - 0.1, high + 0.1)
