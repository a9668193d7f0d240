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
    window, target = report.original_max_position_embeddings, report.target_length
    heads = ["model", f"perplexity at {window}", f"at {target}", "documents", "numbers learned", "time"]
    rows = [_state("as pretrained", report.base), _state(clean(report.plain_name, 60), report.plain)]
    if report.level in TRAINING:
        spent = sum(point.seconds for point in report.points if point.level not in TRAINING)
        rows.append(_state(f"{method_of(report)}, the best constants", report.begun, "0", duration(spent)))
    rows.append(_state(_result_name(report), report.score, f"{report.learned:,}", duration(report.seconds)))
    if window == target:  # factor 1
        heads, rows = [*heads[:2], *heads[3:]], [[*row[:2], *row[3:]] for row in rows]
    return Table(heads, rows)


def _result_name(report: TuneReport) -> str:
    level = clean(report.level, 20)
    if report.level in TRAINING and not report.step:
        return f"{method_of(report)}, {level} found nothing better"
    return f"{method_of(report)}, tuned ({level}{f', step {report.step}' if report.level in TRAINING else ''})"


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
