"""What the tests of plots by pair share: reading a drawn plot back, and a chart as it is printed."""

from io import BytesIO, TextIOWrapper

from rich.console import Console

from ropecli.report.plots import style

TWELVE = (
    *("linear", "ntk", "yarn", "llama3", "longrope", "p-rope", "nope"),
    *("rerope", "self-extend", "lm-infinite", "dual-chunk", "linear*2"),
)


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def texts(drawn):
    """Every text that is seen, and where."""
    with style.drawing():
        drawn.draw_without_rendering()
    (axes,) = drawn.axes
    found = [drawn._suptitle, drawn._supxlabel, axes.xaxis.label, axes.yaxis.label, *axes.get_legend().get_texts()]
    # ticks beyond the limits have labels that are not drawn
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [(text.get_text(), text.get_window_extent()) for text in found if text is not None and text.get_text()]


def printed(renderable, width, encoding="utf-8"):
    file = TextIOWrapper(BytesIO(), encoding=encoding, errors="replace")
    Console(file=file, width=width).print(renderable)
    file.flush()
    return file.buffer.getvalue().decode(encoding)
