#!/usr/bin/env python
"""What teaches far reading: trains `demo` in several ways with several seeds, measures all, and prints the table.

    scripts/study.py [WAY ...]      # trains what runs/study lacks; 6 to 20 minutes of one core for a run
    scripts/study.py measure        # measures what is trained, 90 seconds each, into scripts/study_reports
    scripts/study.py table          # prints the table of recipes/README.md from these reports

`demo` is patched with yarn ×8 for 1,024 tokens. All ways but `half` train on 100 steps of 8,192 tokens, by the recipe
`demo`. A killed run starts anew. Runs and reports that are there stay: delete the reports of a seed to measure it with
a new way. STUDY_SEEDS selects seeds, such as "0 1".
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.evaluation.statistics import ratio_interval, score_difference
from ropecli.reporting.report_files import read_reports
from ropecli.table import Table, markdown

RUNS, REPORTS = Path("runs/study"), Path(__file__).with_name("study_reports")
SEEDS = os.environ.get("STUDY_SEEDS", "0 1 2").split()
LONGCE, SHORT = "--set loss=longce --set longce_cap=2", "--length 256 --set batch_size=32"
WAYS = {
    "plain": "",
    "longce": LONGCE,
    "half": f"{LONGCE} --steps 56",  # in the time of GAPS
    "short": SHORT,
    "pose": f"{SHORT} --positions pose",
}
GAPS = "pose-longce"
"""LongCE on positions with gaps, which went by this table: trained with commit a9e8ba81."""
ALL = (*WAYS, GAPS)
PAIRS = [(GAPS, other) for other in ("longce", "half", "pose", "short")]
LENGTHS = (256, 512, 1024)
CLASSES = ("far", "far, false", "ordinary")
MEASURES = {
    "recall": "eval-ppl --protocol recall --lengths 256,512,1024 --data demo --max-documents 32",
    "tail": "eval-ppl --protocol tail --lengths 256,512,1024 --data demo --max-documents 32",
    "short": "eval-ppl --protocol prefix --lengths 256 --data demo --max-documents 32",
    "variables": "ruler --tasks vt --mode rank --lengths 1024 --samples 50",
}


def ropecli(words: str) -> None:
    print(f"ropecli {words}", flush=True)
    subprocess.run([sys.executable, "-m", "ropecli", *words.split()], check=True)


def train(ways: Sequence[str]) -> None:
    if not (RUNS / "patched").exists():
        ropecli(f"patch demo --method yarn --factor 8 --target-length 1024 --output {RUNS}/patched")
    for seed in SEEDS:
        for way in ways:
            output = RUNS / f"{way}-{seed}"
            if not (output / "model.safetensors").exists():
                shutil.rmtree(output, ignore_errors=True)
                ropecli(f"finetune {RUNS}/patched --recipe demo {WAYS[way]} --seed {seed} --output {output} --quiet")


def measure() -> None:
    REPORTS.mkdir(exist_ok=True)
    for seed in SEEDS:
        trained = [f"{RUNS}/{way}-{seed}" for way in ALL]
        models = ["demo", f"{RUNS}/patched", *(each for each in trained if Path(each, "config.json").exists())]
        for name, words in MEASURES.items():
            output = REPORTS / f"{name}-{seed}.json"
            if not output.exists():
                ropecli(f"{words} {' '.join(models)} --baseline demo --output {output} --quiet")


class Ways:
    """The reports of a measure: of the base, of what is patched, and of each way, one per seed."""

    def __init__(self, name: str) -> None:
        self.of: dict[str, list[Any]] = {way: [] for way in ALL}
        for path in sorted(REPORTS.glob(f"{name}-*.json")):
            self.base, self.patched, *reports = read_reports([path])
            for report in reports:
                self.of[Path(report.checkpoint).name.rpartition("-")[0]].append(report)

    def mean(self, way: str, sums_of: Callable[[Any], np.ndarray]) -> np.ndarray:
        """The mean over the seeds, of each document."""
        return np.mean([sums_of(report) for report in self.of.get(way) or [self.patched]], axis=0)


def table() -> Table:
    """Means over the seeds, with 95% intervals over documents."""
    recall, tail, short, variables = map(Ways, MEASURES)
    reference = recall.patched.reference
    assert reference is not None
    at_own = tail.base.cells[0]
    before = np.array(variables.patched.cells[-1].sums)
    rows = []
    for way in ("patched", *(way for way in ALL if recall.of[way])):
        recalls = [
            _words(np.array(reference.absent.sums) - recall.mean(way, far_at(length)), np.array(reference.gains))
            for length in LENGTHS
        ]
        classes = []
        for name in CLASSES:
            of_base = next(each for each in at_own.by_class if each.task == name)
            lost = np.array(of_base.sums) - tail.mean(way, class_sums(name))
            classes.append(_words(lost, np.array(of_base.weights)))
        changes = []
        for of, base in ((short, short.base.cells[0]), (tail, at_own)):
            rise = of.mean(way, lambda report: np.array(report.cells[-1].sums)) - np.array(base.sums)
            changes.append(_words(rise, np.array(base.weights), percent=True))
        found = variables.mean(way, lambda report: np.array(report.cells[-1].sums))
        score = f"{found.mean():.0%}"
        if way != "patched":
            change, low, high = score_difference(found - before)
            score += f", {100 * change:+.0f} ({100 * low:+.0f} to {100 * high:+.0f})"
        rows.append([way, str(len(recall.of.get(way, [0]))), *recalls, *classes, *changes, score])
    heads = ["way", "seeds", *(f"recall at {length:,}" for length in LENGTHS), *CLASSES, "cost", "tail", "variables"]
    return Table("What teaches far reading", heads, rows, [])


def far_at(length: int) -> Callable[[Any], np.ndarray]:
    return lambda report: np.array(report.arm("far", length).sums)


def class_sums(name: str) -> Callable[[Any], np.ndarray]:
    """The losses of a class of tokens (evaluation/copies.py) at the longest length."""
    return lambda report: np.array(next(each.sums for each in report.cells[-1].by_class if each.task == name))


def _words(sums: np.ndarray, weights: np.ndarray, *, percent: bool = False) -> str:
    low, high = ratio_interval(sums, weights)
    values = [float(sums.sum() / weights.sum()), low or 0.0, high or 0.0]
    if percent:
        return "{:+.1%} ({:+.1%} to {:+.1%})".format(*np.expm1(values))
    return "{:.2f} ({:.2f} to {:.2f})".format(*values)


def differences() -> Table:
    """Paired differences of recall between ways."""
    recall = Ways("recall")
    reference = recall.patched.reference
    assert reference is not None
    rows = []
    for one, other in PAIRS:
        if recall.of[one] and recall.of[other]:
            means = [(recall.mean(other, far_at(at)), recall.mean(one, far_at(at))) for at in LENGTHS]
            rows.append([f"{one} − {other}", *(_words(more - less, np.array(reference.gains)) for more, less in means)])
    return Table("Differences of recall", ["ways", *(f"{length:,}" for length in LENGTHS)], rows, [])


if __name__ == "__main__":
    words = sys.argv[1:]
    if words == ["measure"]:
        measure()
    elif words == ["table"]:
        print(f"{markdown(table())}\n\n{markdown(differences())}")
    else:
        train(words or list(WAYS))
