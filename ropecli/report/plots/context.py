"""Mean loss of a token against how many tokens stood before it: where in its context a model fails."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ropecli.errors import DataError
from ropecli.evaluate.report import EvalReport
from ropecli.report.lines import Line, data_note, lines_of, title_of, window_marks
from ropecli.report.metrics import METRICS
from ropecli.report.plots import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

X_LABEL = "tokens before the scored one"
Y_LABEL = "mean loss (nats per token, lower is better)"
_FEWEST = 3
"""Points, of which a line tells anything."""


def context_points(line: Line) -> list[tuple[float, float]]:
    """(tokens before, nats) of the longest length: each bucket at the geometric middle of its contexts."""
    return [(math.sqrt(one.start * (one.stop - 1)), one.nll) for one in line.report.rows[-1].by_context]


def lines_by_context(reports: Sequence[EvalReport]) -> list[Line]:
    """Raises DataError for a report that holds no loss by context, and where no line has points enough."""
    lines = lines_of(reports)
    for line in lines:
        if not line.report.rows[-1].by_context:
            raise DataError(f"The report of {line.name} holds no loss by context. Use --kind perplexity.")
    if all(len(line.report.rows[-1].by_context) < _FEWEST for line in lines):
        raise DataError(
            f"No line of loss by context has {_FEWEST} points: protocol {lines[0].report.protocol} scored tokens of "
            "nearly the same context. Use --kind perplexity."
        )
    return lines


def context_note(reports: Sequence[EvalReport]) -> str:
    lengths = sorted({report.rows[-1].length for report in reports})
    return "read at " + (f"{lengths[0]} tokens" if len(lengths) == 1 else "each report's longest length")


def draw_context(reports: Sequence[EvalReport]) -> "Figure":
    lines = lines_by_context(reports)
    with style.drawing():
        figure, axes = style.line_figure([line.name for line in lines])
        for index, line in enumerate(lines):
            look = style.BASELINE_LOOK if line.baseline else style.look(index)
            contexts, losses = zip(*context_points(line), strict=True)
            # markers apart from one line to the next, so that lines that lie on each other are seen
            axes.plot(contexts, losses, label=line.name, markevery=(index % 3, 3), **look)
        style.length_axis(axes, [2**power for power in range(_powers(lines) + 1)])
        windows, notes = window_marks(reports, [x for line in lines for x, _ in context_points(line)])
        style.mark_windows(axes, windows)
        axes.set_xlabel(f"{X_LABEL}, logarithmic")
        axes.set_ylabel(Y_LABEL)
        style.legend(axes, axes.lines, [str(line.get_label()) for line in axes.lines])
        style.title(figure, title_of(reports), [context_note(reports), *notes, data_note(reports, METRICS["ppl"])])
    return figure


def _powers(lines: Sequence[Line]) -> int:
    return math.ceil(math.log2(max(line.report.rows[-1].by_context[-1].stop for line in lines)))
