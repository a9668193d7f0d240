"""Benchmarks the levels of `ropecli tune` on the demo checkpoint against default YaRN and full fine-tuning.

    python scripts/bench_tune.py RESULTS.json                      # measure all missing cells
    python scripts/bench_tune.py RESULTS.json --factors 4 --seeds 0
    python scripts/bench_tune.py RESULTS.json --table              # print the results as a Markdown table
    python scripts/bench_tune.py RESULTS.json --judge PROSE        # perplexity on another source; repeatable

All levels calibrate on the same documents of demo-train, or of --data. Perplexity is of the last 128 tokens of each
held-out demo document, or of --judge, at the pretraining length and at the target. `full` trains all parameters with
the same loop on the same sequences. Seconds are the wall time of the tuning only, on a machine that other jobs may
share.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ropecli
from ropecli.attention.patching import live_patch
from ropecli.data.documents import Documents, read_documents
from ropecli.data.sources import DEMO, DEMO_TRAIN, read_texts
from ropecli.evaluation.driver import Store, read
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.report import Cell, loss_change
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.tuning.calibration import Evaluator
from ropecli.tuning.learning import learn
from ropecli.tuning.procedure import make_task, run_task
from ropecli.tuning.task import TuneSettings

WINDOW, TARGETS, HELD_OUT = 256, 128, 32
LEVELS = ("base", "yarn", "grid", "heads", "search-8", "search-40", "full")
"""search-N: N generations; 8 take about as long as `heads`, 40 is the published setting."""
FULL_RATE = 5e-4


@dataclass(frozen=True)
class Texts:
    """data: the calibration source. sequences: calibration sequences."""

    data: str = DEMO_TRAIN
    sequences: int | None = None

    def judged_on(self, judge: str) -> str:
        """Their name together with the source that perplexity is of."""
        few = "" if self.sequences is None else f" of {self.sequences}"
        data = "" if self.data == DEMO_TRAIN else f" on {self.data}"
        return few + data + ("" if judge == DEMO else f" judged on {judge}")


def held_out(tokenizer: Any, target: int, source: str = DEMO) -> Documents:
    return read_documents(read_texts(source), tokenizer, target, most=HELD_OUT, cut=target)


def measured(model: Any, documents: Documents, target: int) -> list[Cell]:
    task = Perplexity(documents, [WINDOW, target], Protocol("tail", targets=TARGETS))
    return task.cells(read(task, LiveReader(model)))


def measure(level: str, factor: float, seed: int, texts: Texts, judges: list[str]) -> list[dict[str, Any]]:
    """Tune once and measure a cell per judge: rows at the pretraining length and the target, seconds, parameters."""
    torch.manual_seed(seed)
    checkpoint = ropecli.open_checkpoint("demo")
    tokenizer = ropecli.load_tokenizer(checkpoint)
    target = round(WINDOW * factor)
    model = ropecli.load_model(checkpoint, dtype="float32", device="cpu")
    untuned = ropecli.make_plan(checkpoint, ropecli.make_spec("yarn", factor))
    learned, step, params = 0, 0, {}
    started = time.perf_counter()
    if level == "yarn":
        live_patch(model, untuned.ropes)
    elif level != "base":
        name, _, iterations = level.partition("-")
        settings = TuneSettings(
            "grid" if name == "full" else name,
            search_iterations=int(iterations or 0),
            targets=TARGETS,
            max_documents=texts.sequences,
            seed=seed,
        )
        task = make_task(checkpoint, factor, texts.data, settings)
        started = time.perf_counter()
        if level == "full":
            live_patch(model, untuned.ropes)
            evaluator = Evaluator(task.calibration.evaluated, WINDOW, target, 0.25, TARGETS, Store())
            best = learn(
                model,
                [(list(model.parameters()), FULL_RATE)],
                task.calibration.sequences,
                evaluator,
                settings,
                start=evaluator.score(model, "0")[0],
            )
            learned, step = sum(parameter.numel() for parameter in model.parameters()), best.step
        else:
            report = run_task(task, model).report
            learned, step, found = report.learned, report.step, report.params
            params = {key: value for key, value in found.items() if not isinstance(value, list)}
            learned = learned or sum(len(value) if isinstance(value, list) else 1 for value in found.values())
    seconds = time.perf_counter() - started
    return [
        {
            "level": level,
            "factor": factor,
            "seed": seed,
            "sequences": texts.sequences,
            "texts": texts.judged_on(judge),
            "seconds": seconds,
            "learned": learned,
            "step": step,
            "params": params,
            "rows": [
                {**{key: value for key, value in vars(cell).items() if key != "by_context"}, "ppl": cell.ppl}
                for cell in measured(model, held_out(tokenizer, target, judge), target)
            ],
        }
        for judge in judges
    ]


def key(level: str, factor: float, seed: int, texts: str) -> str:
    return f"{level} ×{factor:g} seed {seed}{texts}"


def table(found: dict[str, Any]) -> str:
    """Means over seeds. Changes are paired by document on the same tokens, against the pretrained base at its
    pretraining length and against the best constants of the same seed; in brackets, means of the 95% interval ends.
    """
    heads = ["factor", "tuned", "seeds", "learned parameters", "seconds", "at 256", "at the target"]
    lines = [f"| {' | '.join([*heads, 'target against base at 256', 'against grid'])} |"]
    lines.append("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for texts in sorted({cell["texts"] for cell in found.values()}):
        cells_of = [cell for cell in found.values() if cell["texts"] == texts]
        for factor in sorted({cell["factor"] for cell in cells_of}):
            base = next((cell for cell in cells_of if cell["level"] == "base" and cell["factor"] == factor), None)
            for level in LEVELS:
                cells = [cell for cell in cells_of if (cell["level"], cell["factor"]) == (level, factor)]
                grids = {one["seed"]: one for one in cells_of if (one["level"], one["factor"]) == ("grid", factor)}
                if cells and level != "base":
                    lines.append(_line(cells, base, grids))
    return "\n".join(lines)


def _line(cells: list[dict[str, Any]], base: dict[str, Any] | None, grids: dict[int, dict[str, Any]]) -> str:
    first = cells[0]
    against_base = [(cell["rows"][-1], base["rows"][0]) for cell in cells] if base else []
    # yarn is deterministic: one cell serves all seeds
    paired = [
        (cell, grid)
        for cell in cells
        for seed, grid in grids.items()
        if first["level"] == "yarn" or cell["seed"] == seed
    ]
    against_grid = [(cell["rows"][-1], grid["rows"][-1]) for cell, grid in paired if cell is not grid]
    name = first["level"] + first["texts"]
    short, long = (_mean([cell["rows"][at]["ppl"] for cell in cells]) for at in (0, -1))
    seconds = _mean([cell["seconds"] for cell in cells])
    learned = max(cell["learned"] for cell in cells)
    shown = [f"×{first['factor']:g}", name, f"{len(cells)}", f"{learned:,}", f"{seconds:.0f}"]
    return f"| {' | '.join([*shown, f'{short:.2f}', f'{long:.2f}', _change(against_base), _change(against_grid)])} |"


def _change(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    changes = [loss_change(_row(one), _row(other)) for one, other in pairs]
    if not changes:
        return ""
    low, high = (_mean([getattr(change, end) for change in changes]) for end in ("low", "high"))
    return f"{_mean([change.change for change in changes]):+.1%} ({low:+.1%} to {high:+.1%})"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _row(values: dict[str, Any]) -> Cell:
    return Cell("tail", values["length"], tuple(values["sums"]), tuple(values["weights"]))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("results", type=Path)
    asked.add_argument("--factors", default="4,8")
    asked.add_argument("--seeds", default="0,1,2")
    asked.add_argument("--levels", default=",".join(LEVELS))
    asked.add_argument("--sequences", type=int, help="total number of calibration sequences")
    asked.add_argument("--data", default=DEMO_TRAIN, help="calibration source")
    asked.add_argument("--judge", action="append", help="source of the held-out documents; repeatable; default: demo")
    asked.add_argument("--table", action="store_true")
    options = asked.parse_args()
    texts, judges = Texts(options.data, options.sequences), options.judge or [DEMO]
    found = json.loads(options.results.read_text()) if options.results.exists() else {}
    if not options.table:
        for seed in map(int, options.seeds.split(",")):
            for factor in map(float, options.factors.split(",")):
                for level in options.levels.split(","):
                    if level in ("base", "yarn") and seed:
                        continue  # deterministic
                    missing = [
                        judge for judge in judges if key(level, factor, seed, texts.judged_on(judge)) not in found
                    ]
                    for cell in measure(level, factor, seed, texts, missing) if missing else []:
                        name = key(level, factor, seed, cell["texts"])
                        found[name] = cell
                        options.results.write_text(json.dumps(found, indent=1))
                        ends = [f"{row['ppl']:.3f}" for row in cell["rows"]]
                        print(name, ends, f"{cell['seconds']:.0f} s", cell["params"], flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
