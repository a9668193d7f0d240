"""Reports as tables: one report in detail, and the reports of each set of data side by side."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ropecli.errors import shortened
from ropecli.evaluation.report import Cell, Report
from ropecli.messages import duration, size
from ropecli.reporting.lines import (
    BEST_NOTE,
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
    protocol_name,
    reach_words,
    recall_words,
    reference_sentence,
    ruler_sentences,
    sample_count,
    score_words,
    task_name,
)
from ropecli.table import Bold, Table, clean

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
    """One row per length, with the baseline's perplexity; cost and gain below."""
    columns, notes = dict(_COLUMNS), []
    if base := report.baseline:
        of_base = {cell.length: number(cell.ppl) for cell in base.cells}
        columns = {
            "length": columns.pop("length"),
            "ppl": columns.pop("ppl"),
            "baseline ppl": lambda cell: of_base.get(cell.length, "–"),
            **columns,
        }
        shorter = ", read up to its context length" * (base.lengths[-1] < report.lengths[-1])
        notes.append(f"baseline: {clean(base.checkpoint)}, {clean(base.label)}{shorter}")
        notes += map(headline_sentence, report.headlines)
        notes += [HEADLINES_NOTE] if report.headlines else []
    title = f"{_subject(report)}: perplexity by length, {measured_by(report)}, data {clean(report.source)}"
    table = Table(title, list(columns), [[of(cell) for of in columns.values()] for cell in report.cells], notes)
    if verbose:
        return table
    few = ["tokens"] if report.task == "longppl" else []  # the number of key tokens
    return table.only("length", "ppl", "baseline ppl", "95% interval", "bits/byte", *few, "documents")


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
    if base := report.baseline:
        of_base = {length: recall_words(base.recall(length)) for length in base.lengths}
        columns["baseline's recall"] = lambda length: of_base.get(length, "–")
    rows = [[of(length) for of in columns.values()] for length in report.lengths]
    title = f"{_subject(report)}: recall by length, {measured_by(report)}, data {clean(report.source)}"
    table = Table(title, list(columns), rows, [_reach(report), reference_sentence(report), INTERVALS_NOTE])
    return table if verbose else table.only("length", "recall", "baseline's recall", "far gain (nats)", "documents")


def _reach(report: Report) -> str:
    reads, half = report.reads_to(), report.reads_to(0.5)
    if reads is None:
        return f"Does not read at {report.lengths[0]} tokens: far gain and recall are not certainly above 0."
    return f"Reads to {reads} tokens, with recall above one half {f'to {half}' if half else 'at no length'}."


def comparison_tables(reports: Sequence[Report], *, verbose: bool = False) -> list[Table]:
    """One table per set of data, by method and length; or measures side by side if there are several.

    verbose: also each line's paired difference from the first line.
    """
    several = len({(task_name(report), measured_by(report)) for report in reports}) > 1
    tables = [_measures(reports)] if several else []
    if verbose or not several:
        tables += [table for lines in sets_of(reports) for table in set_tables(lines, verbose=verbose)]
    note = None if several else data_note(reports)
    return [*tables[:-1], replace(tables[-1], notes=[*tables[-1].notes, note])] if note else tables


def set_tables(lines: Sequence[Line], *, verbose: bool = True) -> list[Table]:
    """The lines of one set by method and length; if verbose, also their differences from the first line."""
    metric, lengths = metric_of(lines), lengths_of(lines)
    several = len({line.report.checkpoint for line in lines}) > 1
    heads = ["checkpoint", "method"] if several else ["method"]
    names = [[clean(line.report.checkpoint, 40), line.method][-len(heads) :] for line in lines]
    columns = []
    for length in lengths:
        best, texts = best_of(lines, length, metric), [_shown(line, length, metric) for line in lines]
        columns.append([Bold(text) if index in best else text for index, text in enumerate(texts)])
    digests = [line.report.digest for line in lines]
    sections = frozenset(index for index in range(1, len(lines)) if digests[index] != digests[index - 1])
    what, by = task_name(lines[0].report), " and ".join([", ".join(heads), "length"])
    rows = [[*row, *cells] for row, cells in zip(names, zip(*columns, strict=True), strict=True)]
    emphasized = any(isinstance(cell, Bold) for column in columns for cell in column)
    notes = list(filter(None, [best_sentence(lines), f"bold: {BEST_NOTE}" * emphasized]))
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


def _shown(line: Line, length: int, metric: Metric) -> str:
    """The value; for recall, with its interval."""
    if metric is RECALL and length in line.report.lengths:
        return recall_words(line.report.recall(length))
    return metric.shown(line.at(length, metric))


def best_sentence(lines: Sequence[Line]) -> str:
    """The best line at the longest length of several, and whether that is certain; empty if there is none."""
    metric = metric_of(lines)
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


def _measures(reports: Sequence[Report]) -> Table:
    """Measures at the longest length of each report, with 95% intervals; each set of data has columns of its own."""
    sets = [[line.report for line in lines if not line.baseline] for lines in sets_of(reports)]
    names = list(dict.fromkeys((clean(report.checkpoint, 40), clean(report.label)) for report in reports))
    columns: dict[str, dict[tuple[str, str], str]] = {}
    for members in filter(None, sets):
        length = members[0].lengths[-1]
        if members[0].kind == "recall":
            head = f"recall at {length}"
        elif members[0].kind == "scores":
            head = f"{task_name(members[0])} ({clean(str(members[0].mode), 20)}, %) at {length}"
        else:
            head = f"{protocol_name(members[0])} at {length}"
        head += f", {sample_count(members[0])} of {members[0].fingerprint[:6]}" if head in columns else ""
        columns[head] = {
            (clean(report.checkpoint, 40), clean(report.label)): _summary(report, length) for report in members
        }
    rows = [[*name, *(column.get(name, "–") for column in columns.values())] for name in names]
    sources = " and ".join(dict.fromkeys(clean(report.source, 40) for report in reports))
    rulers = [report for report in reports if report.task == "ruler"]
    notes = ["Perplexity: lower is better. Recall and scores: higher. In brackets: 95% intervals."]
    notes += [f"RULER: {' '.join(ruler_sentences(rulers[0])[1:])}"] if rulers else []
    heads = ["checkpoint", "method", *columns]
    return Table(f"measures by method, data {sources}", heads, rows, notes, names=2)


def _summary(report: Report, length: int) -> str:
    if length not in report.lengths:
        return "–"
    if report.kind == "scores":
        return score_words(report, length)
    if report.kind == "recall":
        return recall_words(report.recall(length))
    cell = report.cells_at(length)[0]
    return number(cell.ppl) + (f" ({_interval(cell)})" if _interval(cell) else "")
