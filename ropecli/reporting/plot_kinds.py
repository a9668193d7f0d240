"""The kinds of plot: which function draws each, from what, and which one suits the given reports."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError, did_you_mean
from ropecli.evaluation.eval_report import EvalReport, RetrievalReport
from ropecli.reporting.lines import PPL, Metric
from ropecli.reporting.report_files import Report
from ropecli.tuning.tune_report import TuneReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropecli.checkpoint.inspection import Study

_MOST_LINES = 8
"""Reports; more are drawn as a comparison unless another kind is asked for."""


@dataclass(frozen=True)
class PlotKind:
    """wants: the class of report. module, function: of reporting.figures. metrics: whether it follows --metric."""

    wants: type
    module: str
    function: str
    metrics: bool = False

    def figure(self, reports: Sequence[Any], metric: Metric = PPL) -> "Figure":
        draw = getattr(importlib.import_module(f"ropecli.reporting.figures.{self.module}"), self.function)
        return draw(reports, metric) if self.metrics else draw(reports)


KINDS = {
    "perplexity": PlotKind(EvalReport, "perplexity_plot", "draw_perplexity", metrics=True),
    "context": PlotKind(EvalReport, "perplexity_plot", "draw_context"),
    "comparison": PlotKind(EvalReport, "perplexity_plot", "draw_comparison", metrics=True),
    "retrieval": PlotKind(RetrievalReport, "retrieval_plot", "draw_retrieval"),
    "tuning": PlotKind(TuneReport, "tuning_plot", "draw_tuning"),
    "gains": PlotKind(TuneReport, "tuning_plot", "draw_gains"),
    "tuned-frequencies": PlotKind(TuneReport, "frequencies_plot", "draw_tuned_frequencies"),
}
_ABF = {"abf": {"beta": 50.0}}
_STUDY_MODULES = {
    "wavelengths": "frequencies_plot",
    "decay": "decay_plot",
    "helix": "granularity_plot",
    "frequencies": "frequencies_plot",
    "tradeoff": "granularity_plot",
}
DEFAULT_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "wavelengths": {"linear": {}, "ntk": {}, "yarn": {}, "llama3": {}},
    "decay": {},
    "helix": {"linear": {}, **_ABF},
    "frequencies": {"linear": {}, **_ABF, "ntk": {}, "yarn": {}, "llama3": {}, "p-rope": {}},
    "tradeoff": {"linear": {}, **_ABF, "ntk": {}, "ntk-by-parts": {}, "llama3": {}, "p-rope": {}, "nope": {}},
}
"""What each kind of a checkpoint shows beside it, unless asked for others: methods and their parameters.

tradeoff has ntk-by-parts for yarn: their images differ in length alone.
"""
STUDY_KINDS = tuple(_STUDY_MODULES)


def draw_study(kind: str, study: "Study") -> "Figure":
    """kind: of STUDY_KINDS."""
    module = importlib.import_module(f"ropecli.reporting.figures.{_STUDY_MODULES[kind]}")
    return getattr(module, f"draw_{kind}")(study)


def draw_reports(reports: Sequence[Report], path: Path) -> None:
    """The kind that suits them. Raises OutputError."""
    from ropecli.reporting.figures.style import save

    save(choose_kind(reports).figure(reports), path)


def refuse_unknown_kind(name: str | None) -> None:
    """Raises DataError for a kind that is none, neither of reports nor of a checkpoint."""
    if name is not None and name not in (*KINDS, *STUDY_KINDS):
        raise DataError(
            f"Unknown kind of plot {name!r}. Known: {', '.join(KINDS)}; of a checkpoint {', '.join(STUDY_KINDS)}."
            f"{did_you_mean(name, (*KINDS, *STUDY_KINDS))}"
        )


def choose_kind(reports: Sequence[Report], name: str | None = None) -> PlotKind:
    """The kind asked for, or the one that suits the reports. Raises DataError for reports that it does not draw."""
    found = {report.kind for report in reports}
    if name is None and len(found) > 1:
        raise DataError(
            f"The reports are of different kinds ({', '.join(sorted(found))}), which one plot does not hold. Give "
            "those of one kind, or make a page of all with `ropecli report`."
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
