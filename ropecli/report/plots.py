"""Plots, drawn without a display. Legible in black and white: every line has its own dash and marker."""

from collections.abc import Sequence
from pathlib import Path

from ropecli.atomic import new_file
from ropecli.errors import OutputError
from ropecli.evaluate.report import EvalReport

_MARKERS = "os^Dv<>PX*hp"
_KINDS = (".png", ".svg", ".pdf")
_DASHES = ("-", "--", "-.", ":")


def refuse_unknown_kind(path: Path | None) -> None:
    """Raises OutputError for a plot whose ending is none that can be drawn."""
    if path is not None and path.suffix.lower() not in _KINDS:
        raise OutputError(f"{path} has no ending that can be drawn; known: {', '.join(_KINDS)}.")


def plot_perplexity(reports: Sequence[EvalReport], path: Path, original_window: int | None = None) -> None:
    """Perplexity against length, both axes logarithmic, one line a report; PNG or SVG by the path's ending.

    original_window: marked by a vertical line, tokens. Raises OutputError.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullFormatter

    first = reports[0]
    refuse_unknown_kind(path)
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    for index, report in enumerate(reports):
        axes.plot(
            [row.length for row in report.rows],
            [row.ppl for row in report.rows],
            label=report.label,
            marker=_MARKERS[index % len(_MARKERS)],
            linestyle=_DASHES[index % len(_DASHES)],
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([row.length for row in first.rows])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if original_window:
        axes.axvline(original_window, color="grey", linewidth=1, label=f"pretraining window ({original_window})")
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("perplexity (lower is better)")
    title = f"{first.checkpoint}, protocol {first.protocol}, data {first.source}"
    axes.set_title(title, fontsize=10, parse_math=False)  # names are no formulas, whatever dollars they hold
    axes.grid(True, which="both", linewidth=0.3)
    legend = axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for text in legend.get_texts():
        text.set_parse_math(False)
    try:
        with new_file(path) as partial:
            figure.savefig(partial, dpi=150, format=path.suffix.removeprefix("."))
    finally:
        plt.close(figure)
