"""Reports as tables: one report in detail, and the reports of each set of data side by side."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ropecli.errors import shortened
from ropecli.evaluation.report import Cell, Report, headlines
from ropecli.messages import duration, size
from ropecli.reporting.lines import (
    BEST_NOTE,
    PPL,
    RECALL,
    SCORE,
    Line,
    Metric,
    best_of,
    data_note,
    leading,
    lengths_of,
    metric_of,
    sets_of,
    title_of,
)
from ropecli.reporting.wording import (
    HEADLINES_NOTE,
    INTERVALS_NOTE,
    headline_sentence,
    measured_by,
    number,
    reach_words,
    recall_words,
    reference_sentence,
    ruler_sentences,
    task_name,
)
from ropecli.table import Bold, Table, clean

_FEW = 4
"""Lines of which each has its headlines."""
_COLUMNS: dict[str, Callable[[Cell], str]] = {
    "length": lambda cell: f"{cell.length}",
    "ppl": lambda cell: number(cell.ppl),
    "95% interval": lambda cell: _interval(cell) or "one document",
    "nll (nats)": lambda cell: f"{cell.value:.4f}",
    "bits/byte": lambda cell: "unknown" if cell.bits_per_byte is None else f"{cell.bits_per_byte:.4f}",
    "tokens": lambda cell: f"{cell.tokens}",
    "documents": lambda cell: f"{cell.samples}",
    "time": lambda cell: duration(cell.seconds),
    "tokens/s": lambda cell: f"{cell.tokens_per_second:.0f}",
    "peak memory": lambda cell: size(cell.peak_memory),
}


def _interval(cell: Cell) -> str:
    return "" if cell.low is None or cell.high is None else f"{number(cell.low)} to {number(cell.high)}"


def report_tables(report: Report, *, verbose: bool = True) -> list[Table]:
    """The tables of one report. verbose: show all columns and rows, and the loss by tokens of context."""
    if report.kind == "scores":
        return [_scores(report)]
    if report.kind == "recall":
        return [_recall(report, verbose=verbose)]
    cell, rows = report.cells[-1], []
    for bucket in cell.by_context if verbose else ():
        context = f"{bucket.start}" + f" to {bucket.stop - 1}" * (bucket.stop > bucket.start + 1)
        rows.append([context, f"{bucket.nll:.4f}", f"{bucket.tokens}"])
    title = f"{_subject(report)}: loss by tokens of context at {cell.length} tokens, {measured_by(report)}"
    by_context = [Table(title, ["tokens of context", "nll (nats)", "tokens"], rows)] if rows else []
    return [_perplexity(report, verbose=verbose), *by_context]


def _perplexity(report: Report, *, verbose: bool) -> Table:
    """One row per length."""
    title = f"{_subject(report)}: perplexity by length, {measured_by(report)}, data {clean(report.source)}"
    table = Table(title, list(_COLUMNS), [[of(cell) for of in _COLUMNS.values()] for cell in report.cells])
    if verbose:
        return table
    few = ["tokens"] if report.task == "longppl" else []  # the number of key tokens
    return table.only("length", "ppl", "95% interval", "bits/byte", *few, "documents")


def _subject(report: Report) -> str:
    return clean(report.checkpoint) + (f", {clean(report.label)} in memory" if report.in_memory else "")


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
    rows.append(["mean", *(f"{100 * report.mean(length)[0]:.1f}" for length in report.lengths)])
    ends = [report.interval(length) for length in report.lengths]
    rows.append(["95% (Wilson)", *(f"{100 * low:.0f} to {100 * high:.0f}" for low, high in ends)])
    prompts = [sum(cell.samples for cell in report.cells_at(length)) for length in report.lengths]
    rows.append(["prompts", *map(str, prompts)])
    chance = report.chance(report.lengths[-1])
    if report.task == "ruler":
        notes = ruler_sentences(report)
    else:
        notes = [f"Guessing scores {100 * chance:.3g}%."] if chance else []
    notes.append(f"Pretraining length: {report.original_max_position_embeddings} tokens.")
    title = (
        f"{_subject(report)}: {task_name(report)}, score in percent, {measured_by(report)}, data {clean(report.source)}"
    )
    head = "task" if all(cell.depth is None for cell in report.cells) else "depth"
    return Table(title, [head, *map(str, report.lengths)], rows, notes, sections=frozenset({len(names)}))


def _recall(report: Report, *, verbose: bool) -> Table:
    """One row per length."""
    columns: dict[str, Callable[[int], str]] = {
        "length": str,
        "recall": lambda length: recall_words(report.recall(length)),
        "far gain (nats)": lambda length: recall_words(report.far_gain(length)),
        "nll, passage far": lambda length: f"{report.arm('far', length).value:.3f}",
        "nll, absent": lambda length: f"{report.arm('absent', length).value:.3f}",
        "documents": lambda length: f"{report.arm('far', length).samples}",
    }
    rows = [[of(length) for of in columns.values()] for length in report.lengths]
    title = f"{_subject(report)}: recall by length, {measured_by(report)}, data {clean(report.source)}"
    table = Table(title, list(columns), rows, [_reach(report), reference_sentence(report), INTERVALS_NOTE])
    return table if verbose else table.only("length", "recall", "far gain (nats)", "documents")


def _reach(report: Report) -> str:
    reads, half = report.reads_to(), report.reads_to(0.5)
    if reads is None:
        return f"Does not read at {report.lengths[0]} tokens: far gain and recall are not certainly above 0."
    return f"Reads to {reads} tokens, with recall above one half {f'to {half}' if half else 'at no length'}."


def comparison_tables(reports: Sequence[Report], *, verbose: bool = False) -> list[Table]:
    """A table per set of data, by method and length. verbose: also each line's paired difference from the first."""
    tables = [table for lines in sets_of(reports) for table in set_tables(lines, verbose=verbose)]
    note = data_note(reports)
    return [*tables[:-1], replace(tables[-1], notes=[*tables[-1].notes, note])] if note else tables


def set_tables(lines: Sequence[Line], *, verbose: bool = True) -> list[Table]:
    """The lines of one set by method and length; if verbose, also their differences from the first line."""
    metric, lengths = metric_of(lines), lengths_of(lines)
    several = len({line.report.checkpoint for line in lines}) > 1
    heads = ["checkpoint", "method"] if several else ["method"]
    names = [[clean(line.report.checkpoint, 40), line.method][-len(heads) :] for line in lines]
    columns = []
    for length in lengths:
        best, texts = best_of(lines, length, metric), [_shown(line, length, metric, verbose=verbose) for line in lines]
        columns.append([Bold(text) if index in best else text for index, text in enumerate(texts)])
    digests = [line.report.digest for line in lines]
    sections = frozenset(index for index in range(1, len(lines)) if digests[index] != digests[index - 1])
    what, by = task_name(lines[0].report), " and ".join([", ".join(heads), "length"])
    rows = [[*row, *cells] for row, cells in zip(names, zip(*columns, strict=True), strict=True)]
    emphasized = any(isinstance(cell, Bold) for column in columns for cell in column)
    notes = headline_sentences(lines)
    notes += [HEADLINES_NOTE] if notes else []
    notes += filter(None, [best_sentence(lines)])
    notes += [f"bold: {BEST_NOTE}"] * emphasized
    table_heads = [*heads, *map(str, lengths)]
    if metric is RECALL:
        notes.append(reference_sentence(lines[0].report))
        table_heads += ["reads to", "above ½ to"]
        for row, line in zip(rows, lines, strict=True):
            row += [reach_words(line.report.reads_to(least)) for least in (0, 0.5)]
    table = Table(
        title_of(lines, f": {what} by {by}"), table_heads, rows, notes, names=len(names[0]), sections=sections
    )
    if len(lines) == 1 or not verbose:
        return [table]
    rows = [
        [*row, *("–" if change is None else metric.change_words(change) for change in changes)]
        for row, line in zip(names[1:], lines[1:], strict=True)
        for changes in [[line.change_from(lines[0], length) for length in lengths]]
    ]
    unit = " in percent" if metric.logarithmic else " in percentage points" if metric is SCORE else ""
    sign, pairs = "positive" if metric.higher else "negative", "prompt" if metric is SCORE else "document"
    note = f"{sign} is better; in brackets: 95% interval, paired by {pairs}"
    title = title_of(lines, f": change of {what}{unit} from {lines[0].name}")
    heads += map(str, lengths)
    return [table, replace(table, title=title, heads=heads, rows=rows, notes=[note], sections=frozenset())]


def _shown(line: Line, length: int, metric: Metric, *, verbose: bool) -> str:
    """The value; of recall, with its interval if verbose."""
    if verbose and metric is RECALL and length in line.report.lengths:
        return recall_words(line.report.recall(length))
    return metric.shown(line.at(length, metric))


def headline_sentences(lines: Sequence[Line]) -> list[str]:
    """Cost and gain of one extended model, or of a few: perplexities against the first line."""
    if metric_of(lines) is not PPL or not 1 < len(lines) <= _FEW:
        return []
    first = lines[0].report
    return [
        (f"{line.name}: " if len(lines) > 2 else "") + headline_sentence(headline)
        for line in lines[1:]
        for headline in headlines(line.report, first)
    ]


def best_sentence(lines: Sequence[Line]) -> str:
    """The best line at the longest length of several, and whether that is certain.

    Empty if there is none, and for two lines of which the headlines tell the change.
    """
    metric = metric_of(lines)
    if len(lines) == 2 and headline_sentences(lines):
        return ""
    shared = [length for length in lengths_of(lines) if len(leading(lines, length, metric)) > 1]
    if not shared:
        return ""
    length = shared[-1]
    ranked, best = leading(lines, length, metric), best_of(lines, length, metric)
    first = lines[ranked[0]]
    value = metric.shown(first.at(length, metric)) + metric.unit
    names = [lines[index].name for index in ranked[1:] if index in best]
    if not best:
        certain = "one document gives no interval, so this may be chance"
    elif not names:
        certain = "by the paired 95% intervals, every other is worse"
    elif len(names) == len(ranked) - 1:
        certain = "by the paired 95% intervals, no other is worse"
    else:
        certain = f"by the paired 95% intervals, not worse: {shortened(', '.join(names), 200)}"
    return f"At {length} tokens, {first.name} has the {metric.best}, {value}; {certain}."
