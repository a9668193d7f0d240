"""Reports as tables: all numbers of a set of data, and its lines side by side."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ropecli.evaluation.copies import CONTEXT
from ropecli.evaluation.report import Report, copies_of
from ropecli.evaluation.wording import copies_sentences, recall_words
from ropecli.reporting.lines import BEST_NOTE, DATA_NOTE, Line, base_of, lengths_of, level_lines, sets_of, title_of
from ropecli.reporting.summary import Summary
from ropecli.table import Bold, Table, clean

_FEW = ("model", "length", "ppl", "95% interval", "bits/byte", "recall", "far gain (nats)", "documents")
"""The columns that are always shown."""


class Percent(str):
    """A score by depth or task, which the page shades."""


def measured_tables(reports: Sequence[Report], *, verbose: bool = False) -> list[Table]:
    """Tables of each set: its lines side by side, and all numbers of a single line, of scores, or if verbose."""
    sets, tables = sets_of(reports), []
    for lines in sets:
        if verbose or lines[0].report.by_row or len(lines) == 1:
            tables.append(numbers_table(lines, verbose=verbose))
        if len(lines) > 1:
            tables.append(set_table(lines, verbose=verbose, verdict=Summary([lines]).sentences()))
        tables += copies_tables(lines, verbose=verbose)
    several = [DATA_NOTE] if len(sets) > 1 else []
    return [*tables[:-1], replace(tables[-1], notes=[*tables[-1].notes, *several])]


def numbers_table(lines: Sequence[Line], *, verbose: bool = True) -> Table:
    """All numbers of a set, by line and length; of scores, by depth or task. verbose: all columns."""
    report = lines[0].report
    if report.by_row:
        return _scores(lines)
    texts = {
        line: [[f"{length}", *line.report.columns(length).values()] for length in line.report.lengths] for line in lines
    }
    heads, notes = ["length", *report.columns(report.lengths[0])], report.notes(alone=len(lines) == 1)
    table = _of_lines(title_of(lines, f": {report.title} by length"), heads, texts, notes)
    return table if verbose else table.only(*_FEW)


def _of_lines(title: str, heads: list[str], texts: dict[Line, list[list[str]]], notes: Sequence[str]) -> Table:
    """A section of rows for each line. The first column names the line, if there are several."""
    rows = [[line.name, *row] for line, of_line in texts.items() for row in of_line]
    starts = accumulate(map(len, texts.values()))
    table = Table(title, ["model", *heads], rows, notes, names=2, sections=frozenset(starts))
    return table if len(texts) > 1 else table.only(*heads)


def _scores(lines: Sequence[Line]) -> Table:
    """Scores in percent by depth or task, and their mean; columns are lengths."""
    lengths, texts, notes = lengths_of(lines), {}, []
    for line in lines:
        report = line.report
        scores = {(cell.task, cell.depth, cell.length): Percent(f"{100 * cell.value:.0f}") for cell in report.cells}
        keys = sorted(dict.fromkeys((task, depth) for task, depth, _ in scores), key=lambda key: key[1] or 0.0)
        rows = [
            [clean(task) if depth is None else f"{depth:.3g}"]
            + [scores.get((task, depth, length), "–") for length in lengths]
            for task, depth in keys
        ]
        means = [report.words(length) if length in report.lengths else "–" for length in lengths]
        texts[line] = [*rows, ["mean", *means]]
        named = f"{line.name}: " * (len(lines) > 1)
        notes += [f"{named}{sentence}" for sentence in (*report.conclusions(), *report.notes(alone=False))]
    report = lines[0].report
    if chance := report.chance(report.lengths[-1]):
        notes.append(f"Guessing scores {100 * chance:.3g}%.")
    notes.append(f"Pretraining length: {report.original_max_position_embeddings} tokens.")
    head = "task" if all(cell.depth is None for cell in report.cells) else "depth"
    return _of_lines(title_of(lines, f": {report.title} by {head}, %"), [head, *map(str, lengths)], texts, notes)


def set_table(lines: Sequence[Line], *, verbose: bool = False, verdict: Sequence[str] = ()) -> Table:
    """The lines of one set by length. verbose: also each line's paired change from the base."""
    report, lengths, base = lines[0].report, lengths_of(lines), base_of(lines)
    best = {length: level_lines(lines, length) for length in lengths}
    rows = []
    for line in lines:
        cells = []
        for length in lengths:
            change = line.change_from(base, length) if verbose and line is not base else None
            text = line.shown(length) + (f", {line.change_words(change)}" if change else "")
            cells.append(Bold(text) if line in best[length] else text)
        rows.append([line.name, *cells, *line.report.ends().values()])
    changes = f"After each value: its change from the base, with the 95% interval, paired by {report.samples_are}."
    notes = [*verdict, *[BEST_NOTE] * any(best.values()), *[changes] * bool(verbose and base)]
    notes += [report.meaning] * bool(report.meaning)
    columns = ["model", *map(str, lengths), *report.ends()]
    later = range(1, len(lines))
    sections = frozenset(row for row in later if lines[row].report.checkpoint != lines[row - 1].report.checkpoint)
    return Table(title_of(lines, f": {report.title} by length"), columns, rows, notes, sections=sections)


def copies_tables(lines: Sequence[Line], *, verbose: bool = False) -> list[Table]:
    """The loss by what the text repeats, at the longest length, and the gain over the base at its own; or nothing.

    A line without a base is compared with itself. verbose: also where another token follows.
    """
    base = base_of(lines) or lines[0]
    copies = {line: classes for line in lines if (classes := copies_of(line.report, base.report))}
    if not copies:
        return []
    reference, longest = base.report.settings["reference_length"], max(line.report.lengths[-1] for line in copies)
    copies = {line: classes for line, classes in copies.items() if line.report.lengths[-1] == longest}
    best = Summary([lines]).best[0]
    shown_in_words = best if best in copies else next(iter(copies))
    shown = [each for each in copies[shown_in_words] if verbose or "false" not in each.name]
    rows = [[f"{base.name} at {reference}", *(f"{each.base_loss:.2f}" for each in shown)]]
    for line, classes in copies.items():
        by_name = {each.name: f"{each.loss:.2f}, {recall_words(each.gain)}" for each in classes}
        rows.append([line.name, *(by_name.get(each.name, "–") for each in shown)])
    named = f"{shown_in_words.name}: " * (len(copies) > 1)
    notes = [
        *(f"{named}{sentence}" for sentence in copies_sentences(copies[shown_in_words], reference)),
        f"far: tokens whose {CONTEXT} preceding tokens stood last more than {reference} tokens back; near: within; "
        f"ordinary: the others. Loss in nats, and the gain over {base.name} at {reference} with its 95% interval.",
    ]
    heads = ["model", *(f"{each.name}, {each.share:.1%}" for each in shown)]
    return [Table(title_of(lines, f": loss by what the text repeats, at {longest} tokens"), heads, rows, notes)]
