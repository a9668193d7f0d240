"""Tables of tuning runs."""

import math
from collections.abc import Sequence

from ropecli.evaluation.statistics import LARGEST_NLL
from ropecli.messages import duration
from ropecli.reporting.wording import number
from ropecli.table import Table, clean
from ropecli.tuning.task import Score, TuneReport


def tuning_table(report: TuneReport) -> Table:
    """Scores as pretrained, with default constants, with the best constants, and after tuning."""
    original_length, target = report.original_max_position_embeddings, report.target_length
    trains, method, level = report.level == "heads", tuned_method(report), clean(report.level, 20)
    rows = [_row("as pretrained", report.base), _row(clean(report.untuned_name, 60), report.untuned)]
    if trains:
        spent = sum(point.seconds for point in report.points if point.level != "heads")
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
    scored = f"the last {report.settings.get('targets')} tokens of {report.score.documents} calibration documents"
    title = f"{clean(report.checkpoint)}: scores of {scored} of "
    heads = ["model", f"perplexity at {original_length}", f"at {target}", "learned parameters", "time"]
    table = Table(title + clean(report.source), heads, rows, notes)
    return table if original_length != target else table.only(*heads[:2], *heads[3:])


def tuning_runs(reports: Sequence[TuneReport]) -> Table:
    """One row per run: its result."""
    heads = ["run", "perplexity at the pretraining length", "at the target", "learned parameters", "time", "documents"]
    several = len({report.digest for report in reports}) > 1
    rows = []
    for report in reports:
        name = f"{clean(report.checkpoint, 40)}, " * several + f"{clean(report.level, 20)}, {tuned_method(report)}"
        results = _row(name, report.score, f"{report.learned:,}", duration(report.seconds))
        rows.append([*results, f"{report.score.documents}"])
    keys = ("digest", "fingerprint", "target_length", "original_max_position_embeddings")
    tokens = {(*(getattr(report, key) for key in keys), report.score.documents) for report in reports}
    warning = "Different checkpoints, data or lengths: the perplexities are not comparable."
    return Table("Comparison of tuning runs", heads, rows, [warning] if len(tokens) > 1 else [])


def _row(name: str, score: Score, learned: str = "–", spent: str = "–") -> list[str]:
    return [name, ppl_words(score.pretraining), ppl_words(score.target), learned, spent]


def ppl_words(nll: float) -> str:
    """Format the perplexity of a loss in nats."""
    return number(math.exp(nll)) if nll < LARGEST_NLL else "overflowed"


def tuned_method(report: TuneReport) -> str:
    return f"{clean(report.method, 30)} ×{report.factor:g}"
