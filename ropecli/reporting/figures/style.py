"""Shared by all figures: line styles that differ without colour, axes with round numbers, legends, saving.

Names are expected to be cleaned (table.clean). They are never parsed as formulas, even if they contain dollar signs.
"""

import contextlib
import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.atomic import new_file
from ropecli.errors import OutputError
from ropecli.version import GENERATOR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

_ENDINGS = (".png", ".svg", ".pdf")
_MARKERS = "os^Dv<>PX*p"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
"""Okabe and Ito's, without yellow, which is invisible on white. The three counts have no common divisor."""
GREY = "#666666"
BASELINE_LOOK: dict[str, Any] = {"marker": "|", "linestyle": (0, (1, 1)), "color": "black", "linewidth": 2.2}
_SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",  # keep text as text, for search and screen readers
    "svg.hashsalt": "ropecli",  # the same figure gives the same file
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.handlelength": 4,
}
_LONGEST_LABEL = 44
_LETTER = 0.068
"""Width of a letter in a legend, inches."""
_TICKS_APART = 0.07
"""Minimum distance of two tick labels, as a fraction of a length axis."""
_DPI = 150
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": GENERATOR},
    "svg": {"Creator": GENERATOR, "Date": None},
    "pdf": {"Creator": GENERATOR, "CreationDate": None},
}
"""The program, by which a later run knows its own file, and no date: the same figure gives the same file."""


def refuse_unknown_ending(path: Path | None, *endings: str) -> None:
    """Raise OutputError unless the file name has one of these endings; by default .png, .svg or .pdf."""
    endings = endings or _ENDINGS
    if path is not None and path.suffix.lower() not in endings:
        raise OutputError(f"{path} does not end in {' or '.join(endings)}.")


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Use only our matplotlib settings, and ignore warnings about missing glyphs."""
    import matplotlib as mpl

    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(width: float, height: float) -> "Figure":
    """width, height: inches. The figure is not registered with pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def line_size(names: Sequence[str]) -> tuple[float, float]:
    """Inches of a pair of axes, with room on the right for a legend of these lines."""
    labels = [wrap(name) for name in names]
    widest = max(len(line) for label in labels for line in label.split("\n"))
    lines = sum(label.count("\n") + 1 for label in labels)
    return 7.6 + widest * _LETTER, max(4.3, 1.4 + 0.19 * lines) + 0.7


def wrap(name: str, width: int = _LONGEST_LABEL) -> str:
    return textwrap.fill(name, width)


def save(figure: "Figure", path: Path) -> None:
    """Save as PNG, SVG or PDF, by the ending. Raises OSError."""
    kind = path.suffix.lower().removeprefix(".")
    with drawing(), new_file(path) as partial:
        figure.savefig(partial, dpi=_DPI, format=kind, metadata=_METADATA[kind])


def as_png(figure: "Figure") -> bytes:
    buffer = io.BytesIO()
    with drawing():
        figure.savefig(buffer, dpi=_DPI, format="png")
    return buffer.getvalue()


def look(index: int) -> dict[str, Any]:
    """Style of the line with this index; all 44 combinations of marker and dash are distinct."""
    return {
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "color": _COLOURS[index % len(_COLOURS)],
        "markersize": 5,
        "linewidth": 1.4,
    }


def length_axis(axes: "Axes", lengths: Sequence[int]) -> None:
    """Logarithmic x axis in tokens, labelled at every length with enough room."""
    from matplotlib.ticker import NullLocator

    span, shown = math.log(max(lengths) / min(lengths)), [min(lengths)]
    for length in sorted(lengths):
        if math.log(length / shown[-1]) > _TICKS_APART * span:
            shown.append(length)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{length}" for length in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def log_axis(axis: "Axis", values: Sequence[float], most: int = 10, room: float = 0.05) -> None:
    """Logarithmic axis around positive `values`, with up to about `most` round tick labels.

    room: beyond the largest value, as a fraction of the axis.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = math.log10(min(values)), math.log10(max(values))
    span = max(0.02, high - low)
    limits = max(-300.0, low - 0.05 * span), min(300.0, high + room * span)
    # set limits before the scale: the default limits would overflow
    axis.axes.set(**{f"{axis.axis_name}lim": (10 ** limits[0], 10 ** limits[1])})  # type: ignore[attr-defined]
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    powers = limits[1] - limits[0]
    if powers > 1:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if 3 * powers <= most else (1,), numticks=most))
    else:
        axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}" if value < 1e6 else f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def title(figure: "Figure | SubFigure", text: str, notes: Sequence[str | None] = ()) -> None:
    """Set the title, wrapped, and the notes in smaller type below the axes."""
    width = int(figure.figure.get_size_inches()[0] * 11)  # the parts of a figure are as wide as it is
    figure.suptitle(wrap(text, width), fontsize=10)
    kept = [textwrap.fill(note, int(width * 1.2)) for note in notes if note]
    if kept:
        figure.supxlabel("\n".join(kept), fontsize=8, color="#333333")


def legend(axes: "Axes") -> None:
    """Legend of all labelled lines, to the right of the axes."""
    named = {line: str(line.get_label()) for line in axes.lines}
    shown = {line: label for line, label in named.items() if not label.startswith("_child")}
    # matplotlib omits labels that start with an underscore
    labels = [wrap(f" {label}" if label.startswith("_") else label) for label in shown.values()]
    axes.legend(list(shown), labels, loc="center left", bbox_to_anchor=(1.01, 0.5))
