"""Prints the tables of README.md from the reports: python -m real_model_parts.tables FOLDER."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ropecli.evaluation.report import Change, Report, loss_change
from ropecli.reporting.report_files import read_reports
from ropecli.table import Table, markdown


def main(folder: Path) -> None:
    found = {
        path.stem: [report for report in read_reports([path]) if isinstance(report, Report)]
        for path in sorted(folder.glob("*.json"))
    }
    trained = {name: reports[0] for name, reports in found.items() if name.startswith("tail-trained")}
    for name in found.keys() - trained.keys():
        table = {"prefix": same_length, "tail": same_targets}[found[name][0].task]
        print(markdown(table(name, [(report.label, report) for report in found[name]])), "\n")
    base, control, extended = (trained[f"tail-trained-{name}"] for name in ("base", "control", "yarn-x2"))
    none, yarn, *_ = found["tail-x2"]
    rows = [("none", none), ("yarn ×2", yarn), ("yarn ×2, trained", extended)]
    print(markdown(same_targets("tail-trained-yarn-x2", rows)), "\n")
    print(markdown(same_targets("tail-trained-control", [("none", base), ("none, trained", control)])), "\n")


def same_length(name: str, named: Sequence[tuple[str, Report]]) -> Table:
    """Perplexity by length; below the longest, the change from the first report at the same length."""
    base, lengths = named[0][1], named[0][1].lengths
    heads = ["method", *(f"{length:,}" for length in lengths), f"cost at {lengths[-2]:,}", f"change at {lengths[-1]:,}"]
    rows = [
        [
            label,
            *(f"{report.at(length)[0].ppl:.2f}" for length in lengths),
            *("" if report is base else percent(report.change_from(base, length)) for length in lengths[-2:]),
        ]
        for label, report in named
    ]
    return Table(name, heads, rows, [command(base)])


def same_targets(name: str, named: Sequence[tuple[str, Report]]) -> Table:
    """Perplexity of the same tokens with more context, against the first report at its shortest length."""
    first, lengths = named[0][1].cells[0], named[0][1].lengths
    if len({report.fingerprint for _, report in named}) > 1:
        raise ValueError(f"{name}: the reports are not of the same tokens.")
    heads = ["method", *(f"{length:,}" for length in lengths)]
    heads += [f"{lengths[-1]:,} against the first at {lengths[0]:,}"]
    others = [(first, report.cells[0])[: len(lengths)] for _, report in named]
    heads += [f"{lengths[-1]:,} against itself at {lengths[0]:,}"] * (len(lengths) > 1)
    rows = [
        [
            label,
            *(f"{cell.ppl:.2f}" for cell in report.cells),
            *(percent(loss_change(report.cells[-1], cell)) for cell in cells),
        ]
        for (label, report), cells in zip(named, others, strict=True)
    ]
    return Table(name, heads, rows, [command(named[-1][1])])


def percent(change: Change) -> str:
    middle, low, high = (f"{round(value, 3) + 0:+.1%}" for value in (change.change, change.low, change.high))
    return f"{middle} ({low} to {high})"


def command(report: Report) -> str:
    return " ".join(word for word in report.command if word != "--resume")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
