"""Plots, drawn without a display: PNG, SVG or PDF by the path's ending. Legible in black and white."""

from ropecli.report.plots.comparison import plot_comparison
from ropecli.report.plots.context import plot_context
from ropecli.report.plots.perplexity import plot_perplexity
from ropecli.report.plots.retrieval import plot_retrieval
from ropecli.report.plots.style import refuse_unknown_kind

__all__ = ["plot_comparison", "plot_context", "plot_perplexity", "plot_retrieval", "refuse_unknown_kind"]
