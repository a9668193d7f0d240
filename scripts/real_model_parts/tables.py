"""Prints the tables of README.md from the reports: python -m real_model_parts.tables FOLDER."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ropecli.evaluation.report import Change, Report, loss_change
from ropecli.reporting.report_files import read_reports
from ropecli.table import Table, markdown


def main(folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        reports = [report for report in read_reports([path]) if isinstance(report, Report)]
        table = {"prefix": same_length, "tail": same_targets}[reports[0].task]
        print(markdown(table(path.stem, reports)), "\n")


def same_length(name: str, reports: Sequence[Report]) -> Table:
    """Perplexity by length; below the longest, the change from the first report at the same length."""
    base, lengths = reports[0], reports[0].lengths
    heads = ["method", *(f"{length:,}" for length in lengths), f"cost at {lengths[-2]:,}", f"change at {lengths[-1]:,}"]
    rows = [
        [
            report.label,
            *(f"{report.at(length)[0].ppl:.2f}" for length in lengths),
            *("" if report is base else percent(report.change_from(base, length)) for length in lengths[-2:]),
        ]
        for report in reports
    ]
    return Table(name, heads, rows, [command(base)])


def same_targets(name: str, reports: Sequence[Report]) -> Table:
    """Perplexity of the same tokens with more context, against the first report at its shortest length."""
    first, lengths = reports[0].cells[0], reports[0].lengths
    heads = ["method", *(f"{length:,}" for length in lengths)]
    heads += [
        f"{lengths[-1]:,} against the first at {lengths[0]:,}",
        f"{lengths[-1]:,} against itself at {lengths[0]:,}",
    ]
    rows = [
        [
            report.label,
            *(f"{cell.ppl:.2f}" for cell in report.cells),
            *(percent(loss_change(report.cells[-1], cell)) for cell in (first, report.cells[0])),
        ]
        for report in reports
    ]
    return Table(name, heads, rows, [command(reports[0])])


def percent(change: Change) -> str:
    middle, low, high = (f"{round(value, 3) + 0:+.1%}" for value in (change.change, change.low, change.high))
    return f"{middle} ({low} to {high})"


def command(report: Report) -> str:
    return " ".join(word for word in report.command if word != "--resume")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
