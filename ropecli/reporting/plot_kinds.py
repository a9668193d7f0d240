"""The kinds of plot: the function and input of each, and the default kind for given reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError, did_you_mean
from ropecli.reporting.figures.report_plots import draw_comparison, draw_perplexity, draw_scores
from ropecli.reporting.figures.study_plots import draw_decay, draw_frequencies
from ropecli.reporting.lines import PPL, Metric
from ropecli.reporting.report_files import AnyReport
from ropecli.reporting.tuning_runs import draw_tuning

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 8
"""Maximum reports of a perplexity plot; more are drawn as a comparison unless --kind is given."""


@dataclass(frozen=True)
class PlotKind:
    """wants: kinds of report. metrics: whether it supports --metric, and `draw` takes a metric."""

    wants: tuple[str, ...]
    draw: Callable[..., "Figure"]
    metrics: bool = False

    def figure(self, reports: Sequence[Any], metric: Metric = PPL) -> "Figure":
        return self.draw(reports, metric) if self.metrics else self.draw(reports)


KINDS = {
    "perplexity": PlotKind(("perplexity",), draw_perplexity, metrics=True),
    "comparison": PlotKind(("perplexity", "scores"), draw_comparison, metrics=True),
    "scores": PlotKind(("scores",), draw_scores),
    "tuning": PlotKind(("tune",), draw_tuning),
}
STUDY_KINDS = {"decay": draw_decay, "frequencies": draw_frequencies}
"""Kinds that draw a checkpoint."""
DEFAULT_METHODS: dict[str, dict[str, dict[str, Any]]] = {
    "decay": {},
    "frequencies": {"linear": {}, "abf": {"beta": 50.0}, "ntk": {}, "yarn": {}, "llama3": {}, "p-rope": {}},
}
"""Methods, with parameters, that each kind compares with the checkpoint by default."""


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
    if name is None:
        several = len({report.digest for report in reports}) > 1
        many = len(reports) > _MOST_LINES or (several and len(reports) > 2)
        default = "comparison" if many else "perplexity"
        name = {"perplexity": default, "scores": "scores", "tune": "tuning"}[reports[0].kind]
    kind = KINDS[name]
    for report in reports:
        if report.kind not in kind.wants:
            raise DataError(
                f"--kind {name} cannot draw a {report.kind} report, such as the one of {report.checkpoint!r}."
            )
    return kind
