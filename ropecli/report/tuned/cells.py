"""A tuning run, and several side by side, as cells of text: what the page's tables show."""

from collections.abc import Sequence
from dataclasses import dataclass

from ropecli.report.tuned.course import method_of, names_of, ppl, shown
from ropecli.report.wording import clean, duration
from ropecli.tune.record import TRAINING, Score, TuneReport


@dataclass(frozen=True)
class Table:
    """rows: a name, then a number under each of the other heads."""

    heads: list[str]
    rows: list[list[str]]


def states_of(report: TuneReport) -> Table:
    """The model before, by its method's own constants, by the best ones, and as it was left."""
    heads = [
        "model",
        f"perplexity at {report.original_max_position_embeddings}",
        f"at {report.target_length}",
        "documents",
        "numbers learned",
        "time",
    ]
    rows = [_state("as pretrained", report.base), _state(clean(report.plain_name, 60), report.plain)]
    if report.level in TRAINING:
        spent = sum(point.seconds for point in report.points if point.level not in TRAINING)
        rows.append(_state(f"{method_of(report)}, the best constants", report.begun, "0", duration(spent)))
    steps = f", step {report.step}" if report.level in TRAINING else ""
    name = f"{method_of(report)}, tuned ({clean(report.level, 20)}{steps})"
    rows.append(_state(name, report.score, f"{report.learned:,}", duration(report.seconds)))
    return Table(heads, rows)


def runs_of(reports: Sequence[TuneReport]) -> Table:
    """A line a run: its result."""
    heads = ["run", "perplexity at the window", "at the target", "documents", "numbers learned", "time"]
    rows = [
        _state(name, report.score, f"{report.learned:,}", duration(report.seconds))
        for name, report in zip(names_of(reports), reports, strict=True)
    ]
    return Table(heads, rows)


def _state(name: str, score: Score, learned: str = "–", spent: str = "–") -> list[str]:
    return [name, shown(ppl(score.window)), shown(ppl(score.target)), f"{score.documents}", learned, spent]
