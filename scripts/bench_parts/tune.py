"""The levels of `ropecli tune` on the demo checkpoint, against default YaRN and training of all parameters."""

import inspect
import json
import time
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from bench import Rows

import ropecli
from ropecli.attention.patching import live_patch
from ropecli.data.documents import read_documents
from ropecli.data.sources import DEMO, DEMO_TRAIN, Source
from ropecli.evaluation.driver import Store, score_samples
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.report import Cell, loss_change
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.tuning.calibration import PointScorer
from ropecli.tuning.learning import learn
from ropecli.tuning.procedure import make_task, run_task
from ropecli.tuning.task import TuneSettings

WINDOW, TARGETS = 256, 128
FULL_RATE = 5e-4


def tune(level: str, factor: float, seed: int, data: str, sequences: int | None) -> tuple[Any, dict[str, Any]]:
    """The tuned model; seconds, numbers learned and the constants found."""
    torch.manual_seed(seed)
    checkpoint = ropecli.open_checkpoint("demo")
    model = ropecli.load_model(checkpoint, dtype="float32", device="cpu")
    if level in ("yarn", "full"):
        live_patch(model, ropecli.make_plan(checkpoint, ropecli.make_spec("yarn", factor)).positions.ropes)
    if level in ("base", "yarn"):
        return model, {"seconds": 0.0, "learned": 0, "params": {}}
    name, _, iterations = level.partition("-")
    parameters = inspect.signature(ropecli.tune).parameters
    settings: Any = {key: parameters[key].default for key in TuneSettings.__annotations__} | {
        "level": "grid" if name == "full" else name,
        "iterations": int(iterations or 0),
        "targets": TARGETS,
        "max_documents": sequences,
        "seed": seed,
    }
    task = make_task(checkpoint, factor, data, settings)
    begun = time.perf_counter()
    if level == "full":
        scorer = PointScorer(task.calibration.evaluated, WINDOW, round(WINDOW * factor), 0.25, TARGETS, Store())
        weights, start = list(model.parameters()), scorer.score(model, "0")[0]
        learn(model, [(weights, FULL_RATE)], task.calibration.sequences, scorer, settings, start=start)
        learned, params = sum(weight.numel() for weight in weights), {}
    else:
        report = run_task(task, model).report
        params = {key: value for key, value in report.params.items() if not isinstance(value, list)}
        numbers = sum(len(value) if isinstance(value, list) else 1 for value in report.params.values())
        learned = report.learned or numbers
    return model, {"seconds": time.perf_counter() - begun, "learned": learned, "params": params}


def judge_model(model: Any, target: int, source: str) -> list[dict[str, Any]]:
    """The cells at the pretraining length and at the target, on 32 documents."""
    tokenizer = ropecli.load_tokenizer(ropecli.open_checkpoint("demo"))
    documents = read_documents(Source(source).texts(), tokenizer, target, most=32, cut=target)
    task = Perplexity(documents, [WINDOW, target], Protocol("tail", targets=TARGETS))
    cells = task.cells(score_samples(task, LiveReader(model)))
    return [{"length": cell.length, "sums": cell.sums, "weights": cell.weights} for cell in cells]


def change(pairs: list[tuple[Cell, Cell]]) -> str:
    changes = [loss_change(*pair) for pair in pairs]
    if not changes:
        return ""
    middle, low, high = (mean(getattr(one, end) for one in changes) for end in ("change", "low", "high"))
    return f"{middle:+.1%} ({low:+.1%} to {high:+.1%})"


def run(
    results: Path,
    factors: str = "4,8",
    seeds: str = "0,1,2",
    levels: str = "base,yarn,grid,heads,search-8,search-40,full",
    sequences: int | None = None,
    data: str = DEMO_TRAIN,
    judge: Annotated[list[str] | None, typer.Option()] = None,
) -> Rows:
    """Tune the demo at each level and seed that RESULTS (a JSON file) lacks, and compare all results.

    All levels calibrate on the same documents of --data (--sequences: at most). Perplexity is of the last 128 tokens of
    32 documents of each --judge (default: demo), at the pretraining length and at the target. search-N has N
    generations: 8 take about as long as heads, 40 is the published setting. full trains all parameters with the same
    loop on the same sequences. Seconds are of the tuning only.

    The table has means over seeds. Changes are paired by document on the same tokens, against the pretrained base at
    its pretraining length and against the best constants of the same seed, with means of the 95% intervals' ends.
    """
    found = json.loads(results.read_text()) if results.exists() else {}
    setup = f"{data}, {sequences or 'all'} sequences"
    for seed, factor, level in product(seeds.split(","), factors.split(","), levels.split(",")):
        if level in ("base", "yarn") and seed != "0":
            continue  # deterministic
        keys = {source: " | ".join((f"{setup}, judged on {source}", factor, level, seed)) for source in judge or [DEMO]}
        if missing := [source for source in keys if keys[source] not in found]:
            model, entry = tune(level, float(factor), int(seed), data, sequences)
            target = round(WINDOW * float(factor))
            found |= {keys[source]: {**entry, "cells": judge_model(model, target, source)} for source in missing}
            results.write_text(json.dumps(found, indent=1))
    runs: dict[tuple[str, str, str], dict[str, tuple[Cell, Cell]]] = {}
    for key, entry in found.items():
        title, factor, level, seed = key.split(" | ")
        runs.setdefault((title, factor, level), {})[seed] = tuple(Cell("tail", **cell) for cell in entry["cells"])
    for (title, factor, level), cells in runs.items():
        entries = [found[" | ".join((title, factor, level, seed))] for seed in cells]
        base = runs.get((title, factor, "base"), {}).get("0")
        grids = runs.get((title, factor, "grid"), {}) if level not in ("base", "grid") else {}
        pairs = [
            (cells.get(seed, cells.get("0")), grid) for seed, grid in grids.items() if level == "yarn" or seed in cells
        ]
        yield (
            title,
            {
                "": f"×{factor}, {level}",
                "seeds": len(cells),
                "learned": max(entry["learned"] for entry in entries),
                "seconds": mean(entry["seconds"] for entry in entries),
                "at 256": f"{mean(short.ppl for short, _ in cells.values()):.2f}",
                "at the target": f"{mean(long.ppl for _, long in cells.values()):.2f}",
                "target against base at 256": change([(long, base[0]) for _, long in cells.values()] if base else []),
                "against grid": change([(ours[1], grid[1]) for ours, grid in pairs]),
            },
        )
