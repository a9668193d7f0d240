"""Plots, drawn without a display: PNG, SVG or PDF by the path's ending. Legible in black and white."""

from collections.abc import Sequence
from pathlib import Path

from ropecli.report.metrics import METRICS
from ropecli.report.plots.style import refuse_unknown_kind, save
from ropecli.report.reading import Report

__all__ = ["draw_report_plot", "refuse_unknown_kind"]


def draw_report_plot(reports: Sequence[Report], path: Path, kind: str | None = None) -> None:
    """Of the kind asked for, or of the one that suits the reports. Raises OutputError, and DataError for reports that
    the kind does not draw.
    """
    from ropecli.report.kinds import choose_kind

    refuse_unknown_kind(path)
    save(choose_kind(reports, kind).figure(reports, METRICS["ppl"]), path)
