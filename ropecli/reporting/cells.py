"""Results as text cells, for the tables of the terminal and of the HTML page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ropecli.evaluation.report import EvalReport, RetrievalCell, RetrievalReport, RulerReport
from ropecli.evaluation.results import LengthResult, wilson
from ropecli.reporting.lines import (
    PPL,
    Line,
    best_note,
    best_of,
    by_checkpoint,
    data_note,
    named_lines,
    numbered,
    title_of,
)
from ropecli.reporting.wording import clean, distinct, duration, number, protocol_name, ruler_sentences, size
from ropecli.tuning.tune_report import TRAINING, Score, TuneReport

OVERFLOW = 700.0
"""Nats; perplexity overflows float64 above this."""


@dataclass(frozen=True)
class TextTable:
    """rows: one cell per head."""

    heads: list[str]
    rows: list[list[str]]

    def only(self, *heads: str) -> "TextTable":
        """Keep only these columns."""
        kept = [index for index, head in enumerate(self.heads) if head in heads]
        return TextTable([self.heads[index] for index in kept], [[row[index] for index in kept] for row in self.rows])


def _interval(row: LengthResult) -> str:
    if row.ppl_low is None or row.ppl_high is None:
        return "one document"
    return f"{number(row.ppl_low)} to {number(row.ppl_high)}"


_COLUMNS: dict[str, Callable[[LengthResult], str]] = {
    "length": lambda row: f"{row.length}",
    "ppl": lambda row: number(row.ppl),
    "95% interval": _interval,
    "nll (nats)": lambda row: f"{row.nll:.4f}",
    "bits/byte": lambda row: "unknown" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}",
    "tokens": lambda row: f"{row.tokens}",
    "documents": lambda row: f"{row.documents}",
    "time": lambda row: duration(row.seconds),
    "tokens/s": lambda row: f"{row.tokens_per_second:.0f}",
    "peak memory": lambda row: size(row.peak_memory),
}


def measured_rows(report: EvalReport) -> TextTable:
    """One row per length, with the baseline's perplexity if there is one."""
    table = TextTable(list(_COLUMNS), [[of(row) for of in _COLUMNS.values()] for row in report.rows])
    if report.baseline is not None:
        baseline = {row.length: number(row.ppl) for row in report.baseline.rows}
        table.heads.insert(2, "baseline ppl")
        for cells, row in zip(table.rows, report.rows, strict=True):
            cells.insert(2, baseline.get(row.length, "–"))
    return table


@dataclass(frozen=True)
class ComparedLine:
    """names: one per head. cells: (number, whether it is the best) per length. section: starts another checkpoint."""

    names: list[str]
    cells: list[tuple[str, bool]]
    section: bool


@dataclass(frozen=True)
class ComparisonTable:
    """heads: of the columns before the lengths. notes: shown below the table."""

    title: str
    heads: list[str]
    lengths: list[int]
    lines: list[ComparedLine]
    notes: list[str]


def compare(reports: Sequence[EvalReport]) -> ComparisonTable:
    """One line per report and baseline, grouped by checkpoint.

    The best of each column is chosen among reports with the same tokens and protocol.
    """
    lines = by_checkpoint(named_lines(reports))
    compared = [line.report for line in lines]
    lengths = sorted({row.length for report in compared for row in report.rows})
    best = {length: best_of(compared, length, PPL) for length in lengths}
    shown = {length: PPL.shown_among(line.at(length, PPL) for line in lines) for length in lengths}
    heads = [name for name, of in _HEADS.items() if name == "method" or len({of(line) for line in lines}) > 1]
    rows = []
    for index, line in enumerate(lines):
        values = dict(line.points(PPL))
        cells = [
            (shown[length](values[length]) if length in values else "–", index in best[length]) for length in lengths
        ]
        section = index > 0 and line.report.digest != compared[index - 1].digest
        rows.append(ComparedLine([_HEADS[head](line) for head in heads], cells, section))
    by = "checkpoint, method and length" if "checkpoint" in heads else "method and length"
    notes = [data_note(compared, PPL), f"bold: {best_note(compared)}" if len(compared) > 1 else None]
    return ComparisonTable(
        title_of(reports, f": perplexity by {by}"), heads, lengths, rows, [one for one in notes if one]
    )


_HEADS: dict[str, Callable[[Line], str]] = {
    "checkpoint": lambda line: clean(line.report.checkpoint, 40),
    "method": lambda line: ("baseline: " if line.baseline else "") + clean(line.method),
    "protocol": lambda line: protocol_name(line.report),
    "data": lambda line: f"{clean(line.report.source, 30)} {clean(line.report.fingerprint[:6])}",
}


@dataclass(frozen=True)
class Pivot:
    """A retrieval report by depth and length. rows: (depth as text, the cell at each length or None)."""

    lengths: list[int]
    rows: list[tuple[str, list[RetrievalCell | None]]]


def pivot(report: RetrievalReport) -> Pivot:
    lengths = sorted({cell.length for cell in report.cells})
    depths = sorted({cell.depth for cell in report.cells})
    cells = {(cell.length, cell.depth): cell for cell in report.cells}
    names = distinct(depths, digits=2)
    return Pivot(
        lengths,
        [(name, [cells.get((length, at)) for length in lengths]) for name, at in zip(names, depths, strict=True)],
    )


def length_summary(report: RetrievalReport) -> TextTable:
    """One row per length, over all depths; with mean rank and margin in rank mode."""
    ranked = report.mode == "rank"
    rows = []
    for length in sorted({cell.length for cell in report.cells}):
        cells = [cell for cell in report.cells if cell.length == length]
        hits, trials = sum(cell.hits for cell in cells), sum(cell.trials for cell in cells)
        low, high = wilson(hits, trials)
        means = [_mean(cells, "rank", ".1f"), _mean(cells, "margin", "+.2f")] if ranked else []
        place = "within" if length <= report.original_max_position_embeddings else "beyond"
        interval = f"{100 * low:.0f} to {100 * high:.0f}%"
        rows.append([f"{length}", f"{100 * hits / trials:.0f}%", interval, f"{trials}", *means, place])
    heads = ["length", "found", "95% (Wilson)", "prompts"]
    return TextTable([*heads, *(("mean rank", "margin (nats)") if ranked else ()), "pretraining length"], rows)


@dataclass(frozen=True)
class MeasureTable:
    """Several measures side by side. rows: one text per head. notes: sentences below the table."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    notes: list[str]


def measures(reports: Sequence[EvalReport | RulerReport]) -> MeasureTable:
    """Perplexities and scores of RULER at the longest length of each, with 95% intervals."""
    columns: dict[str, dict[tuple[str, str], str]] = {}
    for report in reports:
        name = (clean(report.checkpoint, 40), clean(report.label))
        if isinstance(report, RulerReport):
            length = report.lengths[-1]
            mean, samples = report.mean(length)
            low, high = (100 * end for end in wilson(mean * samples, samples))
            head, value = f"RULER (%) at {length}", f"{100 * mean:.0f} ({low:.0f} to {high:.0f})"
        else:
            row = report.rows[-1]
            head, value = f"{protocol_name(report)} at {row.length}", f"{row.ppl:.2f}"
            if row.ppl_low is not None and row.ppl_high is not None:
                value += f" ({row.ppl_low:.2f} to {row.ppl_high:.2f})"
        columns.setdefault(head, {})[name] = value
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [[*name, *(column.get(name, "–") for column in columns.values())] for name in names]
    sources = " and ".join(dict.fromkeys(clean(report.source, 40) for report in reports))
    notes = ["Perplexity: lower is better. RULER: higher. In brackets: 95% intervals."]
    rulers = [report for report in reports if isinstance(report, RulerReport)]
    notes += [f"RULER: {' '.join(ruler_sentences(rulers[0])[1:])}"] if rulers else []
    return MeasureTable(f"measures by method, data {sources}", ["checkpoint", "method", *columns], rows, notes)


def ruler_scores(report: RulerReport) -> TextTable:
    """Scores of RULER in percent: one row per task, then the mean with its interval; one column per length."""
    found = {(cell.task, cell.length): cell for cell in report.cells}
    rows = [
        [clean(task), *(f"{100 * found[task, length].score:.0f}" for length in report.lengths)] for task in report.tasks
    ]
    means = [report.mean(length) for length in report.lengths]
    intervals = [wilson(mean * samples, samples) for mean, samples in means]
    rows.append(["mean", *(f"{100 * mean:.1f}" for mean, _ in means)])
    rows.append(["95% (Wilson)", *(f"{100 * low:.0f} to {100 * high:.0f}" for low, high in intervals)])
    return TextTable(["task", *(f"{length}" for length in report.lengths)], rows)


def _mean(cells: Sequence[RetrievalCell], field: str, form: str) -> str:
    """Mean over the prompts of the cells."""
    values = [(getattr(cell, field), cell.trials) for cell in cells if getattr(cell, field) is not None]
    if not values:
        return "–"
    return format(sum(value * trials for value, trials in values) / sum(trials for _, trials in values), form)


def tuning_states(report: TuneReport) -> TextTable:
    """Scores as pretrained, with default constants, with the best constants, and after tuning."""
    original_length, target = report.original_max_position_embeddings, report.target_length
    heads = ["model", f"perplexity at {original_length}", f"at {target}", "documents", "learned parameters", "time"]
    rows = [_state("as pretrained", report.base), _state(clean(report.plain_name, 60), report.plain)]
    if report.level in TRAINING:
        spent = sum(point.seconds for point in report.points if point.level not in TRAINING)
        rows.append(_state(f"{tuned_method(report)}, best constants", report.begun, "0", duration(spent)))
    rows.append(_state(_result_name(report), report.score, f"{report.learned:,}", duration(report.seconds)))
    if original_length == target:  # factor 1
        heads, rows = [*heads[:2], *heads[3:]], [[*row[:2], *row[3:]] for row in rows]
    return TextTable(heads, rows)


def tuning_runs(reports: Sequence[TuneReport]) -> TextTable:
    """One row per run: its result."""
    heads = ["run", "perplexity at the pretraining length", "at the target", "documents", "learned parameters", "time"]
    rows = [
        _state(name, report.score, f"{report.learned:,}", duration(report.seconds))
        for name, report in zip(tuning_names(reports), reports, strict=True)
    ]
    return TextTable(heads, rows)


def _result_name(report: TuneReport) -> str:
    level = clean(report.level, 20)
    if report.level in TRAINING and not report.step:
        return f"{tuned_method(report)}, {level} found nothing better"
    return f"{tuned_method(report)}, tuned ({level}{f', step {report.step}' if report.level in TRAINING else ''})"


def _state(name: str, score: Score, learned: str = "–", spent: str = "–") -> list[str]:
    return [name, ppl_words(score.window), ppl_words(score.target), f"{score.documents}", learned, spent]


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


def tuning_subject(reports: Sequence[TuneReport]) -> str:
    """Checkpoint and data of the runs, or how many there are."""
    checkpoints = list(dict.fromkeys(clean(report.checkpoint) for report in reports))
    sources = list(dict.fromkeys(clean(report.source) for report in reports))
    one = checkpoints[0] if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints"
    return f"{one}, calibration data {sources[0] if len(sources) == 1 else f'of {len(sources)} sources'}"


def of_same_tokens(reports: Sequence[TuneReport]) -> bool:
    """Return whether all runs were scored on the same tokens at the same lengths, so perplexities are comparable."""
    keys = ("digest", "fingerprint", "target_length", "original_max_position_embeddings")
    return len({(*(getattr(one, key) for key in keys), one.score.documents) for one in reports}) == 1
