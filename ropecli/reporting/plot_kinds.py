"""The kinds of plot: the function and input of each, and the default kind for given reports."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError, did_you_mean
from ropecli.reporting.lines import PPL, Metric
from ropecli.reporting.report_files import AnyReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ropecli.checkpoint.inspection import Study

_MOST_LINES = 8
"""Maximum reports of a perplexity plot; more are drawn as a comparison unless --kind is given."""


@dataclass(frozen=True)
class PlotKind:
    """wants: kinds of report. module, function: in reporting.figures. metrics: whether it supports --metric."""

    wants: tuple[str, ...]
    module: str
    function: str
    metrics: bool = False

    def figure(self, reports: Sequence[Any], metric: Metric = PPL) -> "Figure":
        draw = getattr(importlib.import_module(f"ropecli.reporting.figures.{self.module}"), self.function)
        return draw(reports, metric) if self.metrics else draw(reports)


_SCORES = PlotKind(("scores",), "score_plot", "draw_scores")
KINDS = {
    "perplexity": PlotKind(("perplexity",), "perplexity_plot", "draw_perplexity", metrics=True),
    "comparison": PlotKind(("perplexity", "scores"), "perplexity_plot", "draw_comparison", metrics=True),
    "scores": _SCORES,
    "retrieval": _SCORES,  # the names of earlier releases
    "ruler": _SCORES,
    "tuning": PlotKind(("tune",), "tuning_plot", "draw_tuning"),
}
DEFAULT_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "decay": {},
    "frequencies": {"linear": {}, "abf": {"beta": 50.0}, "ntk": {}, "yarn": {}, "llama3": {}, "p-rope": {}},
}
"""Methods, with parameters, that each kind compares with the checkpoint by default."""
STUDY_KINDS = tuple(DEFAULT_METHODS)


def draw_study(kind: str, study: "Study") -> "Figure":
    """Draw one of STUDY_KINDS."""
    module = importlib.import_module(f"ropecli.reporting.figures.{kind}_plot")
    return getattr(module, f"draw_{kind}")(study)


def draw_reports(reports: Sequence[AnyReport], path: Path) -> None:
    """Draw the default kind for these reports. Raises OutputError."""
    from ropecli.reporting.figures.style import save

    save(choose_kind(reports).figure(reports), path)


def refuse_unknown_kind(name: str | None) -> None:
    """Raise DataError for an unknown kind."""
    if name is not None and name not in (*KINDS, *STUDY_KINDS):
        raise DataError(
            f"Unknown kind of plot {name!r}. Known: {', '.join(KINDS)}; for a checkpoint: {', '.join(STUDY_KINDS)}."
            f"{did_you_mean(name, (*KINDS, *STUDY_KINDS))}"
        )


def choose_kind(reports: Sequence[AnyReport], name: str | None = None) -> PlotKind:
    """The given kind, or the default for the reports. Raises DataError for reports that it cannot draw."""
    kinds = {report.kind for report in reports}
    if name is None and len(kinds) > 1:
        raise DataError(
            f"One plot cannot show reports of different kinds ({', '.join(sorted(kinds))}). Give reports of one kind, "
            "or write a page of all of them with `ropecli report`."
        )
    name = name or _default_kind(reports)
    kind = KINDS[name]
    for report in reports:
        if report.kind not in kind.wants:
            raise DataError(
                f"--kind {name} cannot draw a {report.kind} report, such as the one of {report.checkpoint!r}."
            )
    return kind


def _default_kind(reports: Sequence[AnyReport]) -> str:
    if reports[0].kind != "perplexity":
        return {"scores": "scores", "tune": "tuning"}[reports[0].kind]
    checkpoints = {report.digest for report in reports}
    many = len(reports) > _MOST_LINES or (len(checkpoints) > 1 and len(reports) > 2)
    return "comparison" if many else "perplexity"
