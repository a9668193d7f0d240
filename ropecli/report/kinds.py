"""The kinds of plot: one table of what each draws, as a picture and in the terminal."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError, did_you_mean
from ropecli.evaluate.report import EvalReport, RetrievalReport
from ropecli.report.lines import data_note, lines_of, refuse_without, title_of, window_marks
from ropecli.report.metrics import METRICS, Metric
from ropecli.report.reading import Report
from ropecli.report.study import STUDY_KINDS
from ropecli.tune.record import TuneReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_MOST_LINES = 8
"""Reports; more are drawn as a comparison unless another kind is asked for."""


@dataclass(frozen=True)
class Kind:
    """wants: the class of report. figure, terminal: of (reports, metric). metrics: whether it follows --metric."""

    wants: type
    figure: "Callable[[Sequence[Any], Metric], Figure]"
    terminal: "Callable[[Sequence[Any], Metric], RenderableType]"
    metrics: bool = True


def _perplexity_figure(reports: Sequence[EvalReport], metric: Metric) -> "Figure":
    from ropecli.report.plots.perplexity import draw_perplexity

    return draw_perplexity(reports, metric)


def _perplexity_chart(reports: Sequence[EvalReport], metric: Metric) -> "RenderableType":
    from ropecli.report.charts import Chart, Series

    lines = lines_of(reports)
    refuse_without(lines, metric)
    series = [Series(line.name, [(float(length), value) for length, value in line.points(metric)]) for line in lines]
    ticks = sorted({length for line in lines for length, _ in line.points(metric)})
    windows, notes = window_marks(reports, ticks)
    return Chart(
        title=title_of(reports),
        x_label="context length (tokens)",
        y_label=metric.axis,
        series=series,
        x_ticks=ticks,
        logarithmic=metric.logarithmic,
        shown=metric.shown_among(line.points(metric)[-1][1] for line in lines),
        marks=[(window, f"pretraining window: {window} tokens") for window in windows],
        notes=[note for note in (*notes, data_note(reports, metric)) if note],
    )


def _context_figure(reports: Sequence[EvalReport], metric: Metric) -> "Figure":
    from ropecli.report.plots.context import draw_context

    return draw_context(reports)


def _context_chart(reports: Sequence[EvalReport], metric: Metric) -> "RenderableType":
    from ropecli.report.charts import Chart, Series
    from ropecli.report.plots.context import X_LABEL, Y_LABEL, context_note, context_points, lines_by_context

    lines = lines_by_context(reports)
    series = [Series(line.name, context_points(line)) for line in lines]
    windows, notes = window_marks(reports, [x for one in series for x, _ in one.points])
    return Chart(
        title=title_of(reports),
        x_label=X_LABEL,
        y_label=Y_LABEL,
        series=series,
        x_ticks=[4**power for power in range(20)],
        logarithmic=False,
        shown=lambda value: f"{value:.3f}",
        marks=[(window, f"pretraining window: {window} tokens") for window in windows],
        notes=[note for note in (context_note(reports), *notes, data_note(reports, METRICS["ppl"])) if note],
    )


def _comparison_figure(reports: Sequence[EvalReport], metric: Metric) -> "Figure":
    from ropecli.report.plots.comparison import draw_comparison

    return draw_comparison(reports, metric)


def _comparison_bars(reports: Sequence[EvalReport], metric: Metric) -> "RenderableType":
    from ropecli.report.bars import ComparisonBars

    return ComparisonBars(reports, metric)


def _retrieval_figure(reports: Sequence[RetrievalReport], metric: Metric) -> "Figure":
    from ropecli.report.plots.retrieval import draw_retrieval

    return draw_retrieval(reports)


def _retrieval_grids(reports: Sequence[RetrievalReport], metric: Metric) -> "RenderableType":
    from rich.console import Group

    from ropecli.report.grids import retrieval_grid

    return Group(*(retrieval_grid(report) for report in reports))


def _of_tuning(module: str) -> Kind:
    """By a module of report.tuned."""

    def load() -> Any:
        return importlib.import_module(f"ropecli.report.tuned.{module}")

    return Kind(
        TuneReport,
        lambda reports, metric: load().figure(reports),
        lambda reports, metric: load().chart(reports),
        metrics=False,
    )


KINDS = {
    "perplexity": Kind(EvalReport, _perplexity_figure, _perplexity_chart),
    "context": Kind(EvalReport, _context_figure, _context_chart, metrics=False),
    "comparison": Kind(EvalReport, _comparison_figure, _comparison_bars),
    "retrieval": Kind(RetrievalReport, _retrieval_figure, _retrieval_grids, metrics=False),
    "tuning": _of_tuning("search"),
    "gains": _of_tuning("gains"),
    "tuned-frequencies": _of_tuning("frequencies"),
}


def refuse_unknown_name(name: str | None) -> None:
    """Raises DataError for a kind that is none, neither of reports nor of a checkpoint."""
    if name is not None and name not in (*KINDS, *STUDY_KINDS):
        raise DataError(
            f"Unknown kind of plot {name!r}. Known: {', '.join(KINDS)}; of a checkpoint {', '.join(STUDY_KINDS)}."
            f"{did_you_mean(name, (*KINDS, *STUDY_KINDS))}"
        )


def choose_kind(reports: Sequence[Report], name: str | None = None) -> Kind:
    """The kind asked for, or the one that suits the reports. Raises DataError for reports that it does not draw."""
    refuse_unknown_name(name)
    found = {report.kind for report in reports}
    if name is None and len(found) > 1:
        raise DataError(
            f"The reports are of different kinds ({', '.join(sorted(found))}), which one plot does not hold. Give "
            "those of one kind, or make a page of all by `ropecli report`."
        )
    name = name or _suited(reports)
    kind = KINDS[name]
    for report in reports:
        if not isinstance(report, kind.wants):
            raise DataError(f"--kind {name} does not draw a {report.kind} report, as one of {report.checkpoint!r} is.")
    return kind


def _suited(reports: Sequence[Report]) -> str:
    if isinstance(reports[0], RetrievalReport):
        return "retrieval"
    if isinstance(reports[0], TuneReport):
        return "tuning"
    checkpoints = {report.digest for report in reports}
    many = len(reports) > _MOST_LINES or (len(checkpoints) > 1 and len(reports) > 2)
    return "comparison" if many else "perplexity"
