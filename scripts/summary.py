"""Prints one table of several eval-ppl reports: python scripts/summary.py LABEL=REPORT.json ...

The last column holds each row's longest length against the first report's shortest, with a 95% bootstrap
interval over documents, paired: the same target tokens, read further.
"""

import json
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table


def gain(row: dict, base: dict) -> str:
    """Change of perplexity from `base` to `row`, percent."""
    tokens = row["tokens"] / row["documents"]
    difference = (np.array(row["document_nll"]) - np.array(base["document_nll"])) / tokens
    picks = np.random.default_rng(0).integers(0, len(difference), (1000, len(difference)))
    low, high = np.quantile(difference[picks].mean(axis=1), (0.025, 0.975))
    change, low, high = (100 * (np.exp(value) - 1) for value in (difference.mean(), low, high))
    return f"{change:+.1f}% ({low:+.1f} to {high:+.1f})"


def main(arguments: list[str]) -> None:
    reports = {}
    for argument in arguments:
        label, _, path = argument.partition("=")
        reports[label] = json.loads(Path(path).read_text(encoding="utf-8"))["rows"]
    first = next(iter(reports.values()))
    table = Table()
    table.add_column("tokens read:")
    for row in first:
        table.add_column(f"{row['length']}", justify="right")
    table.add_column(f"{first[-1]['length']} against base at {first[0]['length']}", justify="right")
    for label, rows in reports.items():
        table.add_row(label, *(f"{row['ppl']:.2f}" for row in rows), gain(rows[-1], first[0]))
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
