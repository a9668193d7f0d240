"""Prints a table of several eval-ppl reports: python scripts/summary.py LABEL=REPORT.json ...

The last column is the change from the first report at its shortest length to each report at its longest length, with a
95% bootstrap interval, paired by document: the same target tokens with more context.
"""

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ropecli.evaluation.report import loss_change
from ropecli.reporting.report_files import read_reports


def main(arguments: list[str]) -> None:
    labels, paths = zip(*(argument.split("=", 1) for argument in arguments), strict=True)
    reports = read_reports([Path(path) for path in paths])
    first = reports[0].cells
    table = Table()
    table.add_column("context length:")
    for cell in first:
        table.add_column(f"{cell.length}", justify="right")
    table.add_column(f"{first[-1].length} against base at {first[0].length}", justify="right")
    for label, report in zip(labels, reports, strict=True):
        change = loss_change(report.cells[-1], first[0])
        gain = f"{change.change:+.1%} ({change.low:+.1%} to {change.high:+.1%})"
        table.add_row(label, *(f"{cell.ppl:.2f}" for cell in report.cells), gain)
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
