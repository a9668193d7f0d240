"""Prints the tables of README.md from the reports: python -m real_model_parts.tables FOLDER."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from real_model_parts.served import CONTINUED
from ropecli.evaluation.report import Cell, Change, Report, loss_change
from ropecli.evaluation.wording import recall_words
from ropecli.reporting.extended import candidates_table
from ropecli.reporting.lines import sets_of
from ropecli.reporting.report_files import read_reports
from ropecli.reporting.report_tables import copies_tables
from ropecli.scaling.registry import find_method
from ropecli.table import Table, markdown

Lines = Sequence[tuple[str, Report]]


def main(folder: Path) -> None:
    answers = Path(__file__).with_name("answers")
    made = tables({path.stem: read_reports([path]) for path in sorted(folder.glob("*.json"))})
    made += [candidates_table(json.loads(path.read_text("utf-8"))) for path in sorted(folder.glob("extend-*.json"))]
    made += [served(json.loads((answers / "served-16k.json").read_text("utf-8")))]
    made += [questions(json.loads((answers / "questions-16k.json").read_text("utf-8")))]
    for table in made:
        print(f"{markdown(table)}\n")


def tables(found: Mapping[str, Sequence[Report]]) -> list[Table]:
    """found: reports by the name of their file. A table whose report is not there is left out."""
    made: list[Table] = []
    for name, reports in found.items():
        if name not in _ELSEWHERE and not name.startswith(("extend-", "copies-", *_VERSIONS)):
            lines = [(named(report), report) for report in reports]
            if name == "prefix-x2-distance":
                lines += [(report.label, report) for report in found.get("prefix-x2-windows", [])]
            made.append(_TABLES[reports[0].task](name, lines))
    if "tail-x4" in found:
        (base, yarn), distance = found["tail-x4"], found.get("tail-x4-distance", [])[1:]
        rows = [("none", base), *((report.label, report) for report in (yarn, *distance))]
        made.append(same_targets("tail-x4", rows))
    if "tail-trained" in found:
        (control, trained), (none, yarn, *_) = found["tail-trained"], found["tail-x2"]
        rows = [(named(report), report) for report in (none, control, yarn, trained)]
        made.append(same_targets("tail-trained", rows, control=control))
    extended = [name for name in found if name.startswith("extend-") and name.endswith(BY_EXTEND)]
    for name in (*(name for name in found if name.startswith("copies-")), *extended):
        reports = [report for report in found[name] if report.task == "tail"]
        if name == "copies-versions":
            reports += found.get("versions-16k-extended", ())
        [table] = copies_tables(sets_of(reports)[0], verbose=True)
        made.append(replace(table, title=f"{name}: {table.title}"))
    for name in extended:
        recalled = [report for report in found[name] if report.task == "recall"]
        made.append(recall(name, [(named(report), report) for report in recalled]))
    made += [versions(name, found) for name in _VERSIONS if name in found]
    return made


def same_length(name: str, lines: Lines) -> Table:
    """Perplexity by length; at the two longest, the change from the first line at the same length."""
    base, lengths = lines[0][1], lines[0][1].lengths
    heads = ["method", *(f"{length:,}" for length in lengths), f"cost at {lengths[-2]:,}", f"change at {lengths[-1]:,}"]
    rows = [
        [
            label,
            *(f"{report.cells_at(length)[0].ppl:.2f}" if length in report.lengths else "" for length in lengths),
            *("" if report is base else percent(report.change_from(base, length)) for length in lengths[-2:]),
        ]
        for label, report in lines
    ]
    return Table(name, heads, rows, list(dict.fromkeys(command(report) for _, report in lines)))


def same_targets(name: str, lines: Lines, control: Report | None = None) -> Table:
    """Perplexity of the same tokens with more context.

    The last columns compare the longest length of a line with the base, the first line, at its own length; with the
    control at that length; and with the line itself at that length.
    """
    if len({report.fingerprint for _, report in lines}) > 1:
        raise ValueError(f"{name}: the reports are not of the same tokens.")
    base, lengths = lines[0][1], sorted({length for _, report in lines for length in report.lengths})
    at = max(length for length in base.lengths if length <= base.original_max_position_embeddings)
    against: dict[str, Callable[[Report], Report]] = {"the base": lambda report: base}
    if control:
        against["the control"] = lambda report: control
    against["itself"] = lambda report: report
    rows = []
    for label, report in lines:
        values = [f"{report.cells_at(length)[0].ppl:.2f}" if length in report.lengths else "" for length in lengths]
        changes = [
            "" if other(report) is report and report.lengths[-1] == at else _change(report, other(report), at)
            for other in against.values()
        ]
        rows.append([label, *values, *changes])
    heads = ["method", *(f"{length:,}" for length in lengths), *(f"against {what} at {at:,}" for what in against)]
    return Table(name, heads, rows, [command(lines[-1][1])])


def versions(name: str, found: Mapping[str, Sequence[Report]]) -> Table:
    """The end of a new version, read with the old version. Changes are from the base with 8,192 tokens.

    control: with unrelated code in the old version's place.
    """
    [base, *scaled], [near] = found[name], found["versions-ceiling"]
    others = {part: reports for part, reports in found.items() if part.startswith(f"{name}-")}
    single = [report for part, reports in others.items() if not part.endswith("-control") for report in reports]
    control = [report for part, reports in others.items() if part.endswith("-control") for report in reports]
    controls = {named(report): report.cells[-1] for report in control}
    lines = [(named(report), report) for report in (*scaled, *single)]
    if near.document_names == base.document_names:
        lines.insert(0, ("none, old version near", near))
    cell = base.cells[-1]
    rows = [["none", f"{cell.length:,}", f"{cell.samples}", f"{cell.ppl:.2f}", "", "", "", "yes"]]
    for label, report in lines:
        if report.document_names != base.document_names[: len(report.document_names)]:
            raise ValueError(f"{name}: {label} is not of the same documents.")
        cell, other = report.cells[-1], controls.get(label) if report is not near else None
        control_cells = [f"{other.ppl:.2f}", _from_first(other, base)] if other else ["", ""]
        values = [f"{cell.length:,}", f"{cell.samples}", f"{cell.ppl:.2f}", _from_first(cell, base), *control_cells]
        rows.append([label, *values, "no" if find_method(report.method).remaps else "yes"])
    heads = ["method", "tokens", "documents", "perplexity", "change", "control", "change of the control", "stock"]
    reports = [base, *(report for _, report in lines), *control]
    return Table(name, heads, rows, list(dict.fromkeys(map(command, reports))))


def _from_first(cell: Cell, base: Report) -> str:
    """The change from the same documents of the base, the first ones."""
    first = base.cells[-1]
    return percent(
        loss_change(cell, replace(first, sums=first.sums[: cell.samples], weights=first.weights[: cell.samples]))
    )


def _change(report: Report, other: Report, at: int) -> str:
    """The longest length of a report against another one at the length `at`."""
    return percent(loss_change(report.cells[-1], other.cells_at(at)[0]))


def scores(name: str, lines: Lines) -> Table:
    """Scores in percent by checkpoint, length and task, and their mean with Wilson's interval."""
    rows = []
    for report, length in ((line, length) for _, line in lines for length in line.lengths):
        low, high = report.interval(length)
        cells = [f"{100 * cell.value:.0f}" for cell in report.cells_at(length)]
        mean = f"{100 * report.mean(length):.0f} ({100 * low:.0f} to {100 * high:.0f})"
        rows.append([Path(report.checkpoint).name, f"{length:,}", *cells, mean])
    report = lines[0][1]
    return Table(
        name,
        ["checkpoint", "length", *dict.fromkeys(cell.task for cell in report.cells), "mean"],
        rows,
        [command(report)],
    )


def recall(name: str, lines: Lines) -> Table:
    """Recall by length, with its interval."""
    lengths = _RECALLED if name.startswith("recall-") else sorted({at for _, report in lines for at in report.lengths})
    rows = [
        [label, *(recall_words(report.recall(length)) if length in report.lengths else "" for length in lengths)]
        for label, report in lines
    ]
    return Table(name, ["method", *(f"{length:,}" for length in lengths)], rows, [command(lines[-1][1])])


def served(record: Mapping[str, Any]) -> Table:
    """Right tokens with which two servers continue a file; served.py asks them."""
    rows = []
    for name, label in {"base": "base, its own length", "extended": "extended, its whole length"}.items():
        places = [value for key, value in record["answers"].items() if key.startswith(f"copies, {name}, ")]
        counts = np.array(places, float)
        whole = (counts == CONTINUED).sum()
        rows.append([label, f"{len(counts)}", f"{counts.mean():.1f}", f"{whole} of {counts.size}"])
    heads = ["served by llama-server", "documents", f"right tokens of {CONTINUED}", f"all {CONTINUED} right"]
    return Table("served", heads, rows, [*record["servers"].values()])


def questions(record: Mapping[str, Any]) -> Table:
    """Right answers by what was asked, of questions.py."""
    labels = {"base": "{}, the document's end", "extended": "{}", "ceiling": "{}, the fact within its length"}
    asked: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for answer in record["answers"]:
        asked.setdefault((answer["checkpoint"], answer["arm"]), []).append(answer)
    rows = []
    for checkpoint, arm in sorted(asked, key=lambda key: list(labels).index(key[1])):
        answers = asked[checkpoint, arm]
        right = sum(answer["right"] for answer in answers)
        rows.append([labels[arm].format(checkpoint), f"{answers[0]['tokens']:,}", f"{right} of {len(answers)}"])
    return Table("questions", ["model", "tokens", "questions answered"], rows, [" ".join(record["command"])])


def named(report: Report) -> str:
    if report.checkpoint.endswith(BY_EXTEND):
        return f"{report.label}, extend --train"
    trained = report.checkpoint.endswith(("-trained", "/control"))
    return f"{report.label}, trained" if trained else report.label


def percent(change: Change) -> str:
    middle, low, high = (f"{round(value, 3) + 0:+.1%}" for value in (change.change, change.low, change.high))
    return f"{middle} ({low} to {high})"


def command(report: Report) -> str:
    return " ".join(word for word in report.command if word != "--resume")


BY_EXTEND = "k-trained"
_ELSEWHERE = {
    *("prefix-x2-windows", "tail-trained", "tail-x4", "tail-x4-distance"),
    *("versions-ceiling", "versions-float32"),
}
_VERSIONS = ("versions-16k", "versions-12k", "versions-32k")
_RECALLED = (8192, 12288, 16384)
_TABLES = {"prefix": same_length, "tail": same_targets, "ruler": scores, "recall": recall}

if __name__ == "__main__":
    main(Path(sys.argv[1]))
