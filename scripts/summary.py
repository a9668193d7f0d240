"""Prints one table of several eval-ppl reports: python scripts/summary.py LABEL=REPORT.json ...

The last column holds each row's longest length against the first report's shortest: what reading further gains.
"""

import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def main(arguments: list[str]) -> None:
    reports = {}
    for argument in arguments:
        label, _, path = argument.partition("=")
        reports[label] = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    base, *_ = next(iter(reports.values()))
    table = Table()
    table.add_column("checkpoint")
    for row in next(iter(reports.values())):
        table.add_column(f"{row['length']} tokens", justify="right")
    table.add_column(f"longest against base at {base['length']}", justify="right")
    for label, rows in reports.items():
        cells = [f"{row['ppl']:.2f}" for row in rows]
        table.add_row(label, *cells, f"{100 * (rows[-1]['ppl'] / base['ppl'] - 1):+.1f}%")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
