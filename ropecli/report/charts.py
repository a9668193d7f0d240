"""Lines as characters for the terminal: a letter at each point, so that colours are not needed; plain ASCII where the
terminal has no more. Both axes may be logarithmic.
"""

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
_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red", "bright_cyan", "bright_yellow")


@dataclass(frozen=True)
class Series:
    """points: (x, y), ascending in x, x above 0."""

    name: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """x_ticks: where the x axis, always logarithmic, has its numbers. logarithmic: the y axis. marks: vertical lines,
    in the units of x. shown: a y value in words. notes: lines below.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_ticks: Sequence[int]
    logarithmic: bool
    shown: Callable[[float], str]
    marks: Sequence[int] = ()
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
            x, y = series.points[-1]
            yield Text.assemble((letter, f"bold {style}"), f"  {clean(series.name)}: {self.shown(y)} at {x:.0f}")
        for mark in self.marks:
            yield Text(f"{drawing.mark}  pretraining window: {mark} tokens")
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
        self.dot, self.wall, self.floor, self.tick, self.mark = ".|-+:" if ascii_only else "·│─┼┊"
        ys = [y for series in chart.series for _, y in series.points]
        xs = [*chart.marks, *(x for series in chart.series for x, _ in series.points)]
        self.y_low, self.y_high = _spread(min(ys), max(ys), chart.logarithmic)
        self.x_low, self.x_high = min(xs), max(max(xs), 2 * min(xs))
        ticks = self._y_ticks()
        self.y_ticks = {self.row(tick): name for tick, name in zip(ticks, told_apart(ticks), strict=True)}
        self.left = max(map(len, self.y_ticks.values()), default=0) + 1
        self.columns = max(_NARROWEST, width - self.left - 1)
        self.width = self.left + 1 + self.columns
        self.cells = [[(" ", "")] * self.columns for _ in range(_HEIGHT)]

    def _y_ticks(self) -> list[float]:
        if self.chart.logarithmic:
            return round_numbers(self.y_low, self.y_high, 6)
        return even_numbers(self.y_low, self.y_high, 6)

    def row(self, y: float) -> int:
        return round((1 - share(y, self.y_low, self.y_high, self.chart.logarithmic)) * (_HEIGHT - 1))

    def column(self, x: float) -> int:
        return round(share(x, self.x_low, self.x_high, True) * (self.columns - 1 - _MARGIN))

    def lines(self) -> Iterable[Text]:
        for mark in self.chart.marks:
            for row in range(_HEIGHT):
                self.cells[row][self.column(mark)] = (self.mark, "dim")
        styles = _styles(len(self.chart.series))
        for series, style in zip(self.chart.series, styles, strict=True):
            self._draw_path(series, style)
        for letter, series, style in zip(_letters(len(styles)), self.chart.series, styles, strict=True):
            for x, y in series.points:
                self._place(self.row(y), self.column(x), letter, f"bold {style}")
        for row, cells in enumerate(self.cells):
            number = self.y_ticks.get(row, "")
            yield Text.assemble(
                f"{number:>{self.left}}", self.tick if number else self.wall, *cells, no_wrap=True, end="\n"
            )
        yield from self._x_axis()

    def _draw_path(self, series: Series, style: str) -> None:
        for (x0, y0), (x1, y1) in zip(series.points, series.points[1:], strict=False):
            first, last = self.column(x0), self.column(x1)
            rows = self.row(y0), self.row(y1)
            for column in range(first + 1, last):
                row = round(rows[0] + (rows[1] - rows[0]) * (column - first) / (last - first))
                if self.cells[row][column][0] in (" ", self.mark):
                    self.cells[row][column] = (self.dot, style)

    def _place(self, row: int, column: int, letter: str, style: str) -> None:
        """Where another letter stands already, the next place on the right; a + where there is no more room."""
        for at in range(column, min(column + _MARGIN, self.columns)):
            if not (self.cells[row][at][0].isalpha() or self.cells[row][at][0] == "+"):
                self.cells[row][at] = (letter, style)
                return
        self.cells[row][min(column + _MARGIN, self.columns) - 1] = ("+", "bold")

    def _x_axis(self) -> Iterable[Text]:
        axis, numbers = [self.floor] * self.columns, [" "] * (self.width + 8)
        inside = [tick for tick in self.chart.x_ticks if self.x_low <= tick <= self.x_high]
        for tick in inside:
            axis[self.column(tick)] = self.tick
        for tick in with_room(inside, self.column, lambda tick: len(f"{tick}") + 2):
            start = max(0, self.left + 1 + self.column(tick) - len(f"{tick}") // 2)
            if start + len(f"{tick}") <= self.width:
                numbers[start : start + len(f"{tick}")] = f"{tick}"
        yield Text(" " * self.left + self.tick + "".join(axis), no_wrap=True)
        yield Text("".join(numbers).rstrip(), no_wrap=True)


def _spread(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    """Never of no width."""
    if high > low * (1 + 1e-9):
        return low, high
    return (low / 1.1, high * 1.1) if logarithmic else (low - 0.1, high + 0.1)
