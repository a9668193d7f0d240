"""Shared by all figures: a look for each method, axes with round numbers, labels at line ends, saving.

The page takes the same figures as SVG, in the colours of its theme. Names are expected to be cleaned (table.clean).
They are never parsed as formulas, even if they contain dollar signs.
"""

import contextlib
import io
import math
import re
import textwrap
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.atomic import new_file
from ropecli.errors import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

INK, GREY = "#1a1a1a", "#595959"
GRID = "#c8c8c8"
_THEME = {INK: "currentColor", GREY: "var(--faint)", GRID: "var(--line)"}
"""What the page puts where a figure has these colours. The others are visible on its light and its dark paper."""
_COLOURS = ("#0072b2", "#d55e00", "#00875f", "#b0569a", "#8a6d00", "#7a66cc", "#c63a4b", "#1b8599", "#6b7f1e")
"""With a contrast of at least 3 to white and to the page's dark paper."""
_MARKERS = "os^Dv<>PX*p"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
_FIRST = ("yarn", "rerope", "ntk", "dual-chunk", "linear", "llama3", "abf", "self-extend", "p-rope")
"""Methods that are often compared: their colours differ."""
_SETTINGS: dict[Any, Any] = {
    "text.parse_math": False,
    "svg.fonttype": "none",  # keep text as text, for search and screen readers
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.4,
    "grid.color": GRID,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
_LONGEST_LABEL = 40
_LETTER = 0.068
"""Width of a letter in a label, inches."""
_TICKS_APART = 0.13
"""Minimum distance of two tick labels, as a fraction of a length axis."""
_DPI = 150


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


def panel_size(names: Sequence[str]) -> tuple[float, float]:
    """Inches of a pair of axes with these names at the ends of its lines."""
    widest = max(min(len(name), _LONGEST_LABEL) for name in names)
    return 3.6 + widest * _LETTER, max(3.1, 1.1 + 0.17 * len(names))


def save(figure: "Figure", path: Path) -> None:
    """Save as PNG, SVG or PDF, by the ending. Raises OSError."""
    with drawing(), new_file(path) as partial:
        figure.savefig(partial, dpi=_DPI, format=path.suffix.lower().removeprefix("."))


def as_svg(figure: "Figure", alt: str) -> str:
    """The figure as an element of a page: without fixed size and background, in the colours of the page's theme."""
    from markupsafe import escape

    buffer = io.StringIO()
    with drawing():
        figure.savefig(buffer, format="svg", transparent=True)
    svg = buffer.getvalue().partition("<svg ")[2]
    svg = re.sub(r"<metadata>.*?</metadata>|<style .*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub("|".join(_THEME), lambda colour: _THEME[colour[0]], svg)
    return f'<svg role="img" aria-label="{escape(alt)}" {svg}'


def looks(keys: Iterable[str]) -> list[dict[str, Any]]:
    """The style of each method's line: colour and marker the same in every figure, dashes by number of its lines."""
    seen: Counter[str] = Counter()
    styles = []
    for key in keys:
        index = _FIRST.index(key) if key in _FIRST else len(_FIRST) + zlib.crc32(key.encode())
        look = {"marker": _MARKERS[index % len(_MARKERS)], "color": _COLOURS[index % len(_COLOURS)]}
        styles.append({**look, "linestyle": _DASHES[seen[key] % len(_DASHES)], "markersize": 4.5, "linewidth": 1.4})
        seen[key] += 1
    return styles


BASE_LOOK: dict[str, Any] = {"marker": "|", "linestyle": "-", "color": INK, "markersize": 6, "linewidth": 1.8}


def label_ends(axes: "Axes") -> None:
    """Write the name of each labelled line right of the axes, at its end, and move apart those that would overlap."""
    ends = {}
    for line in axes.lines:
        points: np.ndarray = np.ma.filled(np.ma.asarray(line.get_xydata(), dtype=float), np.nan)
        points = points[np.isfinite(points).all(axis=1)]
        if len(points) and not str(line.get_label()).startswith("_child"):  # which has no label
            ends[line] = axes.transAxes.inverted().transform(line.get_transform().transform(points[-1]))
    order = sorted(ends, key=lambda line: ends[line][1])
    grid = axes.get_subplotspec().get_gridspec()  # type: ignore[union-attr]
    apart = 0.165 / (axes.get_figure(root=True).get_size_inches()[1] / grid.nrows - 1.1)  # type: ignore[union-attr]
    places: list[float] = []
    for line in order:
        places.append(max(places[-1] + apart, ends[line][1]) if places else ends[line][1])
    above = max(1.0, apart * (len(order) - 1)) + apart
    for number in reversed(range(len(places))):  # those above the axes move down, and push the others
        places[number] = above = min(places[number], above - apart)
    for line, place in zip(order, places, strict=True):
        arrow = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 1}
        where = {"xycoords": "axes fraction", "va": "center", "fontsize": 8, "arrowprops": arrow}
        name = shortened(str(line.get_label()), _LONGEST_LABEL)
        axes.annotate(name, tuple(ends[line]), (1.05, place), annotation_clip=False, **where)  # type: ignore[arg-type]


def length_axis(axes: "Axes", lengths: Sequence[int]) -> None:
    """Logarithmic x axis in tokens, labelled at every length with enough room."""
    from matplotlib.ticker import NullLocator

    span, shown = math.log(max(lengths) / min(lengths)), [max(lengths)]
    for length in sorted(lengths, reverse=True):
        if math.log(shown[-1] / length) > _TICKS_APART * span:
            shown.append(length)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{length}" for length in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def log_axis(axes: "Axes", values: Sequence[float], most: int = 8, *, ratio: bool = False) -> None:
    """Logarithmic y axis around positive `values`, with up to `most` round tick labels; of ratios, the changes."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = (math.log10(max(end, 1e-300)) for end in (min(values), max(values)))
    room = 0.05 * max(0.02, high - low)
    low, high = max(-300.0, low - room), min(300.0, high + room)
    axes.set_ylim(10**low, 10**high)  # before the scale: the default limits would overflow
    axes.set_yscale("log")
    locator = LogLocator(subs=(1, 2, 5)) if high - low > 1 else MaxNLocator(most, steps=[1, 2, 5, 10])
    shown: dict[float, str] = {}
    for tick in sorted(locator.tick_values(10**low, 10**high), key=lambda tick: (tick != 1, tick)):
        inside = 10**low <= tick <= 10**high
        if inside and all(abs(math.log10(tick / other)) > (high - low) / (most + 2) for other in shown):
            label = f"{tick:.10g}" if tick < 1e6 else f"{tick:g}"
            shown[tick] = (f"{100 * (tick - 1):+.4g}%" if tick != 1 else "0") if ratio else label
    axes.set_yticks(list(shown), list(shown.values()))
    axes.yaxis.set_minor_locator(NullLocator())


def title(figure: "Figure | SubFigure", text: str, notes: Sequence[str | None] = ()) -> None:
    """Set the title, wrapped, and the notes in smaller type below the axes."""
    width = int(figure.figure.get_size_inches()[0] * 11)  # the parts of a figure are as wide as it is
    figure.suptitle(textwrap.fill(text, width), fontsize=10)
    kept = [textwrap.fill(note, int(width * 1.2)) for note in notes if note]
    if kept:
        figure.supxlabel("\n".join(kept), fontsize=8, color=GREY)
