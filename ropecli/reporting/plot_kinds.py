"""The kinds of plot: the function and input of each, and the default kind for given reports."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropecli.errors import DataError, did_you_mean
from ropecli.reporting.figures.report_plots import draw_comparison, draw_perplexity, draw_scores
from ropecli.reporting.figures.study_plots import draw_decay, draw_frequencies
from ropecli.reporting.report_files import AnyReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_LINES = 8
"""Maximum reports of a perplexity plot; more are drawn as a comparison unless --kind is given."""


@dataclass(frozen=True)
class PlotKind:
    """reports: the kinds of report that it draws."""

    reports: tuple[str, ...]
    draw: Callable[[Sequence[Any]], "Figure"]


REPORT_KINDS = {
    "perplexity": PlotKind(("perplexity",), draw_perplexity),
    "comparison": PlotKind(("perplexity", "recall", "scores"), draw_comparison),
    "scores": PlotKind(("scores",), draw_scores),
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
    if name is not None and name not in (*REPORT_KINDS, *STUDY_KINDS):
        raise DataError(
            f"Unknown kind of plot {name!r}. Known: {', '.join(REPORT_KINDS)}; for a checkpoint: "
            f"{', '.join(STUDY_KINDS)}.{did_you_mean(name, (*REPORT_KINDS, *STUDY_KINDS))}"
        )


def choose_kind(reports: Sequence[AnyReport], name: str | None = None) -> PlotKind:
    """The given kind, or the default for the reports. Raises DataError for reports that it cannot draw."""
    if name is None:
        several = len({report.digest for report in reports}) > 1
        many = len(reports) > _MOST_LINES or (several and len(reports) > 2)
        many = many or reports[0].kind == "recall"
        name = "scores" if reports[0].kind == "scores" else "comparison" if many else "perplexity"
    kind = REPORT_KINDS[name]
    for report in reports:
        if report.kind not in kind.reports:
            raise DataError(
                f"A plot of kind {name} cannot show the {report.kind} report of {report.checkpoint!r}. Give reports of "
                "one kind, or write a page of all of them with `ropecli report`."
            )
    return kind
