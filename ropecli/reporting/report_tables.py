"""Reports as tables: one in detail, those of each set of data side by side, and tuning runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ropecli.evaluation.report import Cell, Report
from ropecli.evaluation.statistics import LARGEST_NLL
from ropecli.messages import duration, size
from ropecli.reporting.lines import (
    BEST_NOTE,
    HEADLINES_NOTE,
    Line,
    best_of,
    data_note,
    headline_sentences,
    lengths_of,
    sets_of,
    title_of,
    verdict,
)
from ropecli.reporting.wording import number, recall_words, reference_sentence, ruler_sentences, task_name
from ropecli.table import Bold, Table, clean
from ropecli.tuning.task import Score, TuneReport

_COLUMNS: dict[str, Callable[[Cell], str]] = {
    "length": lambda cell: f"{cell.length}",
    "ppl": lambda cell: number(cell.ppl),
    "95% interval": lambda cell: _interval(cell),
    "nll (nats)": lambda cell: f"{cell.value:.4f}",
    "bits/byte": lambda cell: "unknown" if cell.bits_per_byte is None else f"{cell.bits_per_byte:.4f}",
    "tokens": lambda cell: f"{cell.tokens}",
    "documents": lambda cell: f"{cell.samples}",
    "time": lambda cell: duration(cell.seconds),
    "tokens/s": lambda cell: f"{cell.tokens_per_second:.0f}",
    "peak memory": lambda cell: size(cell.peak_memory),
}


def _interval(cell: Cell) -> str:
    return "one document" if cell.low is None or cell.high is None else f"{number(cell.low)} to {number(cell.high)}"


def report_tables(report: Report, *, verbose: bool = True) -> list[Table]:
    """The tables of one report. verbose: show all columns and rows, and the loss by tokens of context."""
    if report.kind == "scores":
        return [_scores(report)]
    if report.kind == "recall":
        table = _recall(report)
        return [table if verbose else table.only("length", "recall", "far gain (nats)", "documents")]
    table = _by_length(report, _COLUMNS, report.cells)
    if not verbose:
        few = ["tokens"] if report.task == "longppl" else []  # the number of key tokens
        return [table.only("length", "ppl", "95% interval", "bits/byte", *few, "documents")]
    cell, rows = report.cells[-1], []
    for bucket in cell.by_context:
        context = f"{bucket.start}" + f" to {bucket.stop - 1}" * (bucket.stop > bucket.start + 1)
        rows.append([context, f"{bucket.nll:.4f}", f"{bucket.tokens}"])
    title = title_of([report], f": loss by tokens of context at {cell.length} tokens")
    return [table, Table(title, ["tokens of context", "nll (nats)", "tokens"], rows)] if rows else [table]


def _by_length(
    report: Report, columns: Mapping[str, Callable[[Any], str]], entries: Sequence[Any], notes: Sequence[str] = ()
) -> Table:
    """One row per length. entries: what the columns show, one by length."""
    rows = [[of(entry) for of in columns.values()] for entry in entries]
    return Table(title_of([report], f": {report.kind} by length"), list(columns), rows, notes)


def score_rows(report: Report) -> tuple[list[str], list[list[float | None]]]:
    """(names of the rows, scores by length): depths, or tasks of cells without a depth."""
    keys = list(dict.fromkeys((cell.task, cell.depth) for cell in report.cells))
    keys.sort(key=lambda key: key[1] or 0.0)
    values = {(cell.task, cell.depth, cell.length): cell.value for cell in report.cells}
    return (
        [clean(task) if depth is None else f"{depth:.3g}" for task, depth in keys],
        [[values.get((*key, length)) for length in report.lengths] for key in keys],
    )


def _scores(report: Report) -> Table:
    """Scores in percent by depth or task, and their mean; columns are lengths."""
    names, scores = score_rows(report)
    rows = [
        [name, *("–" if score is None else f"{100 * score:.0f}" for score in row)]
        for name, row in zip(names, scores, strict=True)
    ]
    by_length = [(*report.mean(length), *report.interval(length)) for length in report.lengths]
    rows += [
        ["mean", *(f"{100 * mean:.1f}" for mean, _, _, _ in by_length)],
        ["95% (Wilson)", *(f"{100 * low:.0f} to {100 * high:.0f}" for _, _, low, high in by_length)],
        ["prompts", *(f"{samples}" for _, samples, _, _ in by_length)],
    ]
    chance = report.chance(report.lengths[-1])
    notes = [f"Guessing scores {100 * chance:.3g}%."] if chance else []
    if report.task == "ruler":
        notes = ruler_sentences(report)
    notes.append(f"Pretraining length: {report.original_max_position_embeddings} tokens.")
    head = "task" if all(cell.depth is None for cell in report.cells) else "depth"
    title = title_of([report], f": {task_name(report)}, score in percent")
    return Table(title, [head, *map(str, report.lengths)], rows, notes, sections=frozenset({len(names)}))


def _recall(report: Report) -> Table:
    columns: dict[str, Callable[[int], str]] = {
        "length": str,
        "recall": lambda length: recall_words(report.recall(length)),
        "far gain (nats)": lambda length: recall_words(report.far_gain(length)),
        "nll, passage far": lambda length: f"{report.arm('far', length).value:.3f}",
        "nll, absent": lambda length: f"{report.arm('absent', length).value:.3f}",
        "documents": lambda length: f"{report.arm('far', length).samples}",
    }
    reads, half = report.reads_to(), report.reads_to(0.5)
    sentence = f"Reads to {reads} tokens, with recall above one half {f'to {half}' if half else 'at no length'}."
    if reads is None:
        sentence = f"Does not read at {report.lengths[0]} tokens: far gain and recall are not certainly above 0."
    notes = [sentence, reference_sentence(report), "In brackets: 95% interval over documents."]
    return _by_length(report, columns, report.lengths, notes)


def comparison_tables(reports: Sequence[Report], *, verbose: bool = False) -> list[Table]:
    """A table per set of data, by method and length. verbose: also each line's paired difference from the first."""
    tables = [table for lines in sets_of(reports) for table in set_tables(lines, verbose=verbose)]
    note = data_note(reports)
    return [*tables[:-1], replace(tables[-1], notes=[*tables[-1].notes, note])] if note else tables


def set_tables(lines: Sequence[Line], *, verbose: bool = True) -> list[Table]:
    """The lines of one set by method and length; if verbose, also their differences from the first line."""
    reports, lengths = [line.report for line in lines], lengths_of(lines)
    is_recall, several = reports[0].kind == "recall", len({report.checkpoint for report in reports}) > 1
    heads = ["checkpoint", "method"] if several else ["method"]
    names = [[clean(line.report.checkpoint, 40), line.method][-len(heads) :] for line in lines]
    best = {length: best_of(lines, length) for length in lengths}
    rows = []
    for index, line in enumerate(lines):
        texts = {length: line.shown(length) for length in lengths}
        if is_recall and verbose:
            texts |= {length: recall_words(line.report.recall(length)) for length in line.report.lengths}
        cells = [Bold(text) if index in best[length] else text for length, text in texts.items()]
        if is_recall:
            cells += [str(line.report.reads_to(least) or "–") for least in (0, 0.5)]
        rows.append([*names[index], *cells])
    notes = verdict(lines)
    notes += [HEADLINES_NOTE] if headline_sentences(lines) else []
    notes += [f"bold: {BEST_NOTE}"] if any(best.values()) else []
    notes += [reference_sentence(reports[0])] if is_recall else []
    title = title_of(reports, f": {task_name(reports[0])} by {', '.join(heads)} and length")
    columns = [*heads, *map(str, lengths), *["reads to", "above ½ to"] * is_recall]
    later = range(1, len(lines))
    sections = frozenset(index for index in later if reports[index].digest != reports[index - 1].digest)
    table = Table(title, columns, rows, notes, names=len(heads), sections=sections)
    return [table, _differences(lines, heads, names)] if verbose and later else [table]


def _differences(lines: Sequence[Line], heads: Sequence[str], names: Sequence[Sequence[str]]) -> Table:
    """The paired differences from the first line. heads, names: the first columns."""
    lengths, metric, rows = lengths_of(lines), lines[0].metric, []
    for name, line in zip(names[1:], lines[1:], strict=True):
        changes = [line.change_from(lines[0], length) for length in lengths]
        rows.append([*name, *("–" if change is None else metric.change_words(change) for change in changes)])
    reports = [line.report for line in lines]
    title = title_of(reports, f": change of {task_name(reports[0])}{metric.changes} from {lines[0].name}")
    pairs = "prompt" if reports[0].kind == "scores" else "document"
    note = f"{'positive' if metric.higher else 'negative'} is better; in brackets: 95% interval, paired by {pairs}"
    return Table(title, [*heads, *map(str, lengths)], rows, [note], names=len(heads))


def tuning_table(report: TuneReport) -> Table:
    """Scores as pretrained, with default constants, with the best constants, and after tuning."""
    original_length, target = report.original_max_position_embeddings, report.target_length
    method, result, notes = f"{report.method} ×{report.factor:g}", f"tuned ({report.level})", []
    rows = [_tuning_row("as pretrained", report.base), _tuning_row(report.untuned_name, report.untuned)]
    if report.level == "heads":
        spent = sum(point.seconds for point in report.points if point.level != "heads")
        rows.append(_tuning_row(f"{method}, best constants", report.start, "0", duration(spent)))
        result = f"tuned (heads, step {report.step})"
        notes = [
            f"Rounding the weights to their saved dtype changes the logits by {report.rounding:.1g} of the largest one."
        ]
        if not report.step:
            result = "heads found nothing better"
            notes = ["heads did not improve on the best constants; only these are written."]
    rows.append(_tuning_row(f"{method}, {result}", report.score, f"{report.learned:,}", duration(report.seconds)))
    scored = f"the last {report.settings.get('targets')} tokens of {report.score.documents} calibration documents"
    heads = ["model", f"perplexity at {original_length}", f"at {target}", "learned parameters", "time"]
    table = Table(f"{report.checkpoint}: scores of {scored} of {report.source}", heads, rows, notes)
    return table if original_length != target else table.only(*heads[:2], *heads[3:])


def tuning_runs(reports: Sequence[TuneReport]) -> Table:
    """One row per run: its result."""
    heads = ["run", "perplexity at the pretraining length", "at the target", "learned parameters", "time", "documents"]
    several = len({report.digest for report in reports}) > 1
    rows = []
    for report in reports:
        name = f"{report.checkpoint}, " * several + f"{report.level}, {report.method} ×{report.factor:g}"
        results = _tuning_row(name, report.score, f"{report.learned:,}", duration(report.seconds))
        rows.append([*results, f"{report.score.documents}"])
    keys = ("digest", "fingerprint", "target_length", "original_max_position_embeddings")
    tokens = {(*(getattr(report, key) for key in keys), report.score.documents) for report in reports}
    warning = "Different checkpoints, data or lengths: the perplexities are not comparable."
    return Table("Comparison of tuning runs", heads, rows, [warning] if len(tokens) > 1 else [])


def _tuning_row(name: str, score: Score, learned: str = "–", spent: str = "–") -> list[str]:
    return [name, ppl_words(score.pretraining), ppl_words(score.target), learned, spent]


def ppl_words(nll: float) -> str:
    """Format the perplexity of a loss in nats."""
    return number(math.exp(nll)) if nll < LARGEST_NLL else "overflowed"
