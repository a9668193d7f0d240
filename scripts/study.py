#!/usr/bin/env python
"""What teaches far reading: trains `demo` in several ways with several seeds, measures all, and prints the table.

    scripts/study.py [WAY ...]      # trains what runs/study lacks; 6 to 20 minutes of one core for a run
    scripts/study.py measure        # measures what is not in scripts/study_reports, 90 seconds each
    scripts/study.py table          # prints the tables of recipes/README.md from these reports

`demo` is patched with yarn ×8 for 1,024 tokens. Ways without --steps train on 100 steps of 8,192 tokens, by the recipe
`demo`. A killed run starts anew; runs and reports that are there stay. STUDY_SEEDS selects seeds, such as "0 1".
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.data.sources import Source
from ropecli.data.stream import open_stream
from ropecli.evaluation.report import Reference
from ropecli.evaluation.statistics import ratio_interval, score_difference
from ropecli.live.loading import load_tokenizer
from ropecli.names import DEMO_TRAIN
from ropecli.reporting.report_files import read_reports
from ropecli.table import Table, markdown
from ropecli.training.recipe_schema import make_recipe

RUNS, REPORTS = Path("runs/study"), Path(__file__).with_name("study_reports")
SEEDS = os.environ.get("STUDY_SEEDS", "0 1 2").split()
CAP, SHORT = "--set loss=longce --set longce_cap=", "--length 256 --set batch_size=32"
LONGCE = f"{CAP}2"
PACKED = f"--data {RUNS}/mixture.jsonl --sequences packed --steps 40"
ANSWERS = f"--data {RUNS}/answers.jsonl --steps 20"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ message.content }}{% else %}"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}\n"
)
WAYS = {
    "plain": "",
    "cap1.5": f"{CAP}1.5",
    "longce": LONGCE,
    "cap3": f"{CAP}3",
    "cap5": f"{CAP}5",
    "rate": f"{LONGCE} --lr 1e-3",
    "lora": f"{LONGCE} --adapter lora --lr 2e-3",
    "lora-low": f"{LONGCE} --adapter lora --lr 3e-4",
    "half": f"{LONGCE} --steps 56",  # in the time of GAPS
    "short": SHORT,
    "mid": "--length 512 --set batch_size=16",
    "pose": f"{SHORT} --positions pose",
    "mix": PACKED,
    "mix-longce": f"{PACKED} {LONGCE}",
    "answers": ANSWERS,
    "answers-longce": f"{ANSWERS} {LONGCE}",
}
GAPS, EXACT = "pose-longce", "mix-exact-0.15"
"""Not in ropecli: LongCE on positions with gaps (commit a9e8ba81), and EXACT's weights (a prototype)."""
ALL = (*WAYS, GAPS, EXACT)
PAIRS = [(GAPS, other) for other in ("longce", "half", "pose", "short")]
PAIRS += [("longce", other) for other in ("plain", "cap1.5", "cap3", "cap5", "rate", "lora", "lora-low")]
PAIRS += [("plain", "mid"), ("plain", "short"), ("answers-longce", "answers")]
PAIRS += [(way, "mix") for way in ("mix-longce", EXACT)]
CHOICE = ("plain", "cap1.5", "longce", "cap3", "cap5")
"""The cap is chosen among these, on documents of the training text that no run reads."""
LENGTH, LENGTHS = 1024, (256, 512, 1024)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CLASSES = ("far", "far, false", "ordinary")
RECALL = "eval-ppl --protocol recall --lengths 256,512,1024"
MEASURES = {
    "recall": f"{RECALL} --data demo --max-documents 32",
    "tail": "eval-ppl --protocol tail --lengths 256,512,1024 --data demo --max-documents 32",
    "short": "eval-ppl --protocol prefix --lengths 256 --data demo --max-documents 32",
    "variables": "ruler --tasks vt --mode rank --lengths 1024 --samples 50",
}
CHOOSE = f"{RECALL} --data {RUNS}/unseen.jsonl"


def ropecli(words: str) -> None:
    print(f"ropecli {words}", flush=True)
    subprocess.run([sys.executable, "-m", "ropecli", *words.split()], check=True)


def train(ways: Sequence[str]) -> None:
    if not (RUNS / "unseen.jsonl").exists():  # written last
        for name in ("patched", "chat"):
            shutil.rmtree(RUNS / name, ignore_errors=True)
        ropecli(f"patch demo --method yarn --factor 8 --target-length 1024 --output {RUNS}/patched")
        shutil.copytree(RUNS / "patched", RUNS / "chat")
        (RUNS / "chat/chat_template.jinja").write_text(TEMPLATE)
        write_data()
    for seed in SEEDS:
        for way in ways:
            output = RUNS / f"{way}-{seed}"
            if not (output / "model.safetensors").exists():
                shutil.rmtree(output, ignore_errors=True)
                model = RUNS / ("chat" if way.startswith("answers") else "patched")
                ropecli(f"finetune {model} --recipe demo {WAYS[way]} --seed {seed} --output {output} --quiet")


def measure() -> None:
    REPORTS.mkdir(exist_ok=True)
    for seed in SEEDS:
        for name, words in MEASURES.items():
            _measure(REPORTS / f"{name}-{seed}.json", words, ALL, seed)
        _measure(REPORTS / f"choice-{seed}.json", CHOOSE, CHOICE, seed)


def _measure(output: Path, words: str, ways: Sequence[str], seed: str) -> None:
    """Add what is trained and not yet in a file of reports."""
    trained = [path for path in (RUNS / f"{way}-{seed}" for way in ways) if (path / "config.json").exists()]
    models, stored, new = [str(path) for path in (RUNS / "patched", *trained)], None, RUNS / "new.json"
    if output.exists():
        stored = json.loads(output.read_text())
        there = {report["checkpoint"] for report in stored["reports"]}
        models = [model for model in models if model not in there]
    if models:
        ropecli(f"{words} demo {' '.join(models)} --baseline demo --output {new} --quiet")
        reports = json.loads(new.read_text())
        if stored:
            reports["reports"] = [*stored["reports"], *reports["reports"][1:]]
        output.write_text(json.dumps(reports, ensure_ascii=False, separators=(",", ":")) + "\n")
        new.unlink()


def write_data() -> None:
    """Write what `mix` and `answers` train on, and the documents for the choice, all of demo's training text.

    mixture: every other file whole, of the rest each function. answers: a function's body after up to 2,600 characters
    before it. unseen: 24 files of two sequences or more of which no run trains on any.
    """
    mixture, answers, unseen = [], [], []
    tokenizer = load_tokenizer(open_checkpoint("demo"))
    trained: set[bytes] = set()
    for seed in (0, 1, 2):
        recipe = make_recipe(Path("recipes/finetune/demo.yaml"), {"seed": seed})
        trained |= {row.tobytes() for row in open_stream(recipe, tokenizer, LENGTH, LENGTH).batch(range(800)).ids}
    for index, (_, text) in enumerate(Source(DEMO_TRAIN).texts()):
        ids = np.array(tokenizer(text)["input_ids"])
        sequences = [ids[at : at + LENGTH].tobytes() for at in range(0, len(ids) - LENGTH + 1, LENGTH)]
        if len(sequences) > 1 and trained.isdisjoint(sequences):
            unseen.append({"text": text})
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:
            continue
        lines = text.splitlines(keepends=True)
        functions = [(node.lineno, node.end_lineno) for node in nodes if isinstance(node, FUNCTIONS)]
        mixture += (
            [{"text": "".join(lines[start - 1 : end])} for start, end in functions] if index % 2 else [{"text": text}]
        )
        for start, end in functions[-3:]:
            prompt, completion = "".join(lines[:start])[-2600:], "".join(lines[start:end])
            if len(prompt) >= 2000 and 100 <= len(completion) <= 900:
                answers.append({"prompt": prompt, "completion": completion})
    step = len(unseen) // 24
    for name, rows in (("mixture", mixture), ("answers", answers), ("unseen", unseen[::step][:24])):
        (RUNS / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


class Ways:
    """The reports of a measure: of the base, of what is patched, and of each way, one per seed."""

    def __init__(self, name: str) -> None:
        self.of: dict[str, list[Any]] = {way: [] for way in ALL}
        for path in sorted(REPORTS.glob(f"{name}-*.json")):
            self.base, self.patched, *reports = read_reports([path])
            for report in reports:
                self.of[Path(report.checkpoint).name.rpartition("-")[0]].append(report)

    def mean(self, way: str, sums_of: Callable[[Any], np.ndarray], seeds: int | None = None) -> np.ndarray:
        """The mean over the first seeds, or over all of them, of each document."""
        return np.mean([sums_of(report) for report in (self.of.get(way) or [self.patched])[:seeds]], axis=0)

    @property
    def reference(self) -> Reference:
        """Of recall, the base's losses."""
        assert self.patched.reference is not None
        return self.patched.reference

    def recalls(self, way: str) -> list[str]:
        """Recall at each of LENGTHS."""
        absent, gains = np.array(self.reference.absent.sums), np.array(self.reference.gains)
        return [_words(absent - self.mean(way, far_at(length)), gains) for length in LENGTHS]


def choice() -> Table:
    """The caps on documents that no run trains on: recall, and the loss of passages that stand nowhere before."""
    measured = Ways("choice")
    absent = measured.reference.absent
    rows = []
    for way in ("patched", *(way for way in CHOICE if measured.of[way])):
        ordinary = np.array(absent.sums) - measured.mean(
            way, lambda report: np.array(report.arm("absent", LENGTH).sums)
        )
        rows.append([way, *measured.recalls(way), _words(ordinary, np.array(absent.weights))])
    heads = ["way", *(f"recall at {length:,}" for length in LENGTHS), "ordinary at 1,024"]
    return Table("Choice of the cap", heads, rows, [])


def table() -> Table:
    """Means over the seeds, with 95% intervals over documents."""
    recall, tail, short, variables = map(Ways, MEASURES)
    at_own = tail.base.cells[0]
    before = np.array(variables.patched.cells[-1].sums)
    rows = []
    for way in ("patched", *(way for way in ALL if recall.of[way] and short.of[way])):
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
        rows.append([way, str(len(recall.of.get(way, [0]))), *recall.recalls(way), *classes, *changes, score])
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
    """Paired differences of recall between ways, over the seeds that both have."""
    recall = Ways("recall")
    gains = np.array(recall.reference.gains)
    rows = []
    for one, other in PAIRS:
        if seeds := min(len(recall.of[way]) for way in (one, other)):
            means = [tuple(recall.mean(way, far_at(at), seeds) for way in (other, one)) for at in LENGTHS]
            rows.append([f"{one} − {other}", *(_words(more - less, gains) for more, less in means)])
    return Table("Differences of recall", ["ways", *(f"{length:,}" for length in LENGTHS)], rows, [])


if __name__ == "__main__":
    words = sys.argv[1:]
    if words == ["measure"]:
        measure()
    elif words == ["table"]:
        print("\n\n".join(map(markdown, (table(), differences(), choice()))))
    else:
        train(words or list(WAYS))
