"""Tables and names of tuning runs."""

import math
from collections.abc import Sequence

from ropecli.reporting.lines import numbered
from ropecli.reporting.wording import duration, number
from ropecli.table import Table, clean
from ropecli.tuning.task import TRAINING, Score, TuneReport

OVERFLOW = 700.0
"""Nats; perplexity overflows float64 above this."""


def tuning_table(report: TuneReport) -> Table:
    """Scores as pretrained, with default constants, with the best constants, and after tuning."""
    original_length, target = report.original_max_position_embeddings, report.target_length
    trains, method, level = report.level in TRAINING, tuned_method(report), clean(report.level, 20)
    rows = [_row("as pretrained", report.base), _row(clean(report.untuned_name, 60), report.untuned)]
    if trains:
        spent = sum(point.seconds for point in report.points if point.level not in TRAINING)
        rows.append(_row(f"{method}, best constants", report.start, "0", duration(spent)))
    result = f"{method}, tuned ({level}{f', step {report.step}' * trains})"
    notes = []
    if trains and report.step:
        notes = [
            f"Rounding the weights to their saved dtype changes the logits by {report.rounding:.1g} of the largest one."
        ]
    elif trains:
        result = f"{method}, {level} found nothing better"
        notes = [f"{level} did not improve on the best constants; only these are written."]
    rows.append(_row(result, report.score, f"{report.learned:,}", duration(report.seconds)))
    scored = f"the last {report.settings.get('targets')} tokens of {report.score.documents} calibration documents of "
    title = f"{clean(report.checkpoint)}: scores of {scored}"
    heads = ["model", f"perplexity at {original_length}", f"at {target}", "learned parameters", "time"]
    table = Table(title + clean(report.source), heads, rows, notes)
    return table if original_length != target else table.only(*heads[:2], *heads[3:])


def tuning_runs(reports: Sequence[TuneReport]) -> Table:
    """One row per run: its result."""
    heads = ["run", "perplexity at the pretraining length", "at the target", "learned parameters", "time", "documents"]
    rows = [
        [*_row(name, report.score, f"{report.learned:,}", duration(report.seconds)), f"{report.score.documents}"]
        for name, report in zip(tuning_names(reports), reports, strict=True)
    ]
    keys = ("digest", "fingerprint", "target_length", "original_max_position_embeddings")
    tokens = {(*(getattr(report, key) for key in keys), report.score.documents) for report in reports}
    warning = "Different checkpoints, data or lengths: the perplexities are not comparable."
    return Table("Comparison of tuning runs", heads, rows, [warning] if len(tokens) > 1 else [])


def _row(name: str, score: Score, learned: str = "–", spent: str = "–") -> list[str]:
    return [name, ppl_words(score.pretraining), ppl_words(score.target), learned, spent]


def ppl_of(nll: float) -> float:
    """Perplexity of a loss in nats; infinite if it overflows."""
    return math.exp(nll) if nll < OVERFLOW else math.inf


def ppl_words(nll: float) -> str:
    return number(ppl_of(nll)) if nll < OVERFLOW else "overflowed"


def tuning_names(reports: Sequence[TuneReport]) -> list[str]:
    """Name of each run: level, method, factor, number of learned parameters, and the checkpoint if they differ."""
    several = len({report.digest for report in reports}) > 1
    names = []
    for report in reports:
        before = f"{clean(report.checkpoint, 40)}, " if several else ""
        learned = f", {report.learned:,} learned parameter{'s'[: report.learned != 1]}" if report.learned else ""
        names.append(clean(f"{before}{clean(report.level, 20)}, {tuned_method(report)}{learned}", 120))
    return numbered(names)


def tuned_method(report: TuneReport) -> str:
    return f"{clean(report.method, 30)} ×{report.factor:g}"
