"""What all plots share: looks that differ without colour, axes in tokens, titles and legends outside the data, saving.

Names are no formulas, whatever dollars they hold, and come cleaned.
"""

import contextlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.atomic import new_file
from ropecli.errors import DataError, OutputError
from ropecli.report.ticks import round_numbers, share, with_room
from ropecli.report.wording import told_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ENDINGS = (".png", ".svg", ".pdf")
_MARKERS = "os^Dv<>PX*p"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
"""Okabe and Ito's, without the yellow that white swallows. The three counts share no divisor."""
GREY = "#666666"
_SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",  # letters stay letters, to be read aloud and searched
    "svg.hashsalt": "ropecli",  # the same picture is the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.3,
    "legend.frameon": False,
}
_MOST_TICKS = 100
_DIGIT = 0.014
"""Width of one, as a share of the x axis."""
LETTER = 0.008
"""Width of one, inches a point of its size."""
MOST_LINES = len(_MARKERS) * len(_DASHES)
"""On one pair of axes; of so many, no two look alike."""
_IN_A_COLUMN = 24
_LONGEST_LABEL = 44


def refuse_unknown_kind(path: Path | None) -> None:
    """Raises OutputError for a plot whose ending is none that can be drawn."""
    if path is not None and path.suffix.lower() not in _ENDINGS:
        raise OutputError(f"{path} has no ending that can be drawn; known: {', '.join(_ENDINGS)}.")


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Our settings, and no other program's; silent about letters that the font has not."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(width: float, height: float) -> "Figure":
    """In inches; of no window and no list of open figures."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def line_figure(names: Sequence[str], others: Sequence[str] = ()) -> "tuple[Figure, Axes]":
    """As large as its lines and their legend ask for. others: what else stands in the legend.

    Raises DataError for more lines than looks.
    """
    if len(names) > MOST_LINES:
        raise DataError(
            f"{len(names)} lines are too many for one pair of axes, where at most {MOST_LINES} look different. "
            "Give fewer of them; of reports, --kind comparison shows more."
        )
    wrapped = [wrap(name, _LONGEST_LABEL) for name in (*names, *others)]
    columns = _legend_columns(wrapped)
    rows = sum(name.count("\n") + 1 for name in wrapped) / columns
    width = 6.8 + columns * (0.8 + max(widest(wrapped) * 8 * LETTER, 1.6))
    figure = new_figure(width, max(5.0, 1.5 + 0.19 * rows))
    return figure, figure.subplots()


def wrap(name: str, width: int) -> str:
    """In lines, broken at blanks and before the parts of a path where there are any."""
    lines = [""]
    for part in re.split(r"(?<=\s)|(?=/)", name):
        for piece in textwrap.wrap(part, width, drop_whitespace=False) or [""]:
            if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def widest(texts: Sequence[str]) -> int:
    """The letters of the longest line in any of them."""
    return max(len(line) for text in texts for line in text.split("\n"))


def save(figure: "Figure", path: Path) -> None:
    """Raises OutputError."""
    refuse_unknown_kind(path)
    kind = path.suffix.lower().removeprefix(".")
    with drawing(), new_file(path) as partial:
        figure.savefig(partial, dpi=150, format=kind, metadata=_undated(kind))


def as_svg(figure: "Figure") -> str:
    with drawing():
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=_undated("svg"))
    return buffer.getvalue()


def _undated(kind: str) -> dict[str, None]:
    return {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})


def look(index: int) -> dict[str, Any]:
    """Of the line with this index: no two of 44 share both marker and dash."""
    return {
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "color": _COLOURS[index % len(_COLOURS)],
        "markersize": 5,
        "linewidth": 1.4,
    }


BASELINE_LOOK: dict[str, Any] = {
    "marker": "|",
    "linestyle": (0, (1, 1)),
    "color": "#000000",
    "markersize": 8,
    "linewidth": 2.2,
}


def length_axis(axes: "Axes", lengths: Sequence[int]) -> None:
    """The x axis in tokens, logarithmic, with a tick at every length, and its number where there is room."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter

    low, high = min(lengths), max(lengths)
    named = with_room(
        lengths, lambda length: share(length, low, high, logarithmic=True), lambda length: _DIGIT * len(f"{length}")
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(named))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{length}" for length in named]))
    rest = [length for length in lengths if length not in named]
    axes.xaxis.set_minor_locator(FixedLocator(rest if len(rest) <= _MOST_TICKS else []))
    axes.xaxis.set_minor_formatter(NullFormatter())


def value_axis(axes: "Axes", which: str, values: Sequence[float], most: int = 9, room: float = 0.05) -> None:
    """A logarithmic axis with up to `most` ticks at round numbers. which: x or y.

    room: beyond the largest value, as a share of the axis.
    """
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    limits = _limits(min(values), max(values), room)
    # before the scale, whose own limits would pass all numbers
    (axes.set_xlim if which == "x" else axes.set_ylim)(*limits)
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    ticks = round_numbers(max(limits[0], min(values) / 2), limits[1], most)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FixedFormatter(told_apart(ticks)))
    axis.set_minor_locator(NullLocator())


def _limits(low: float, high: float, room: float) -> tuple[float, float]:
    """Of a logarithmic axis, which float64 must be able to tell."""
    powers = math.log10(low), math.log10(high)
    span = max(0.02, powers[1] - powers[0])
    return 10 ** max(-300.0, powers[0] - 0.05 * span), 10 ** min(305.0, powers[1] + room * span)


def few_ticks(axes: "Axes", which: str, most: int) -> None:
    """On a linear axis. which: x or y."""
    from matplotlib.ticker import MaxNLocator

    (axes.xaxis if which == "x" else axes.yaxis).set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))


def mark_windows(axes: "Axes", windows: Sequence[int]) -> None:
    """A vertical line at each pretraining window, tokens, with its name above the data."""
    for window in windows:
        axes.axvline(window, color=GREY, linewidth=1, linestyle=(0, (6, 3)), label=f"pretraining window ({window})")
    axes.margins(x=0.04)


def title(figure: "Figure", text: str, notes: Sequence[str | None] = ()) -> None:
    """Above everything, in lines that fit; notes in smaller letters below the axes."""
    width = int(figure.get_size_inches()[0] * 11)
    figure.suptitle(wrap(text, width), fontsize=10)
    kept = [note for note in notes if note]
    if kept:
        figure.supxlabel("\n".join(textwrap.fill(note, int(width * 1.2)) for note in kept), fontsize=8, color="#333333")


def legend(axes: "Axes", handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Beside the axes, where no data are."""
    # matplotlib leaves out labels that begin with an underscore
    shown = [wrap(f" {label}" if label.startswith("_") else label, _LONGEST_LABEL) for label in labels]
    axes.legend(
        handles,
        shown,
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        ncols=_legend_columns(shown),
        handlelength=4,
    )


def _legend_columns(labels: Sequence[str]) -> int:
    return 1 if len(labels) <= _IN_A_COLUMN else 2
