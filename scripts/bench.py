"""Runs one of the benchmarks in bench_parts/ and prints its tables as Markdown.

    python scripts/bench.py eval             # one of: eval, load, patch, plan, read, remapping, train
    python scripts/bench.py eval --help      # what it compares, and its options
    python scripts/bench.py eval --json      # {title: rows}

Its function `run` yields (title, row) pairs. What is compared runs alternately and the best of each counts, so that
ratios are reliable on a busy machine. Memory is measured in new processes.
"""

import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

Rows = Iterator[tuple[str, dict[str, Any]]]
"""Titles of tables, and rows as {column: value}. The first column is a label."""
MIB = 2**20


def in_new_process(function: Callable[..., Any], *arguments: Any, launcher: tuple[str, ...] = ()) -> Any:
    """The result of a part's function in a new process. Arguments and result are made of what JSON has."""
    call = [Path(inspect.getfile(function)).stem, "--call", function.__name__, json.dumps(arguments)]
    run = subprocess.run([sys.executable, *launcher, __file__, *call], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def memory_meter() -> Callable[[], float]:
    """Returns a function: the peak of this process since now, above what it holds now, MiB."""
    import psutil
    import torch

    from ropecli.live.devices import peak_memory, reset_peak

    before, cpu = psutil.Process().memory_info().rss, torch.device("cpu")
    reset_peak(cpu)
    return lambda: (peak_memory(cpu) - before) / MIB


def best_times(
    ways: Mapping[str, Callable[[int], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Best time of each way, seconds. They run alternately; each is given the number of the round."""
    best = dict.fromkeys(ways, float("inf"))
    for number in range(rounds):
        for name, way in ways.items():
            begun = clock()
            way(number)
            best[name] = min(best[name], clock() - begun)
    return best


def show(rows: Rows, as_json: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    tables: dict[str, list[dict[str, Any]]] = {}
    for title, row in rows:
        tables.setdefault(title, []).append(row)
        print(f"{title}: {next(iter(row.values()))}", file=sys.stderr)
    if as_json:
        print(json.dumps(tables, indent=2))
        return
    for title, measured in tables.items():
        table = Table(*measured[0], title=title, title_justify="left", box=box.MARKDOWN)
        for row in measured:
            table.add_row(*map(_cell, row.values()))
        Console(width=200).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    import typer

    parts = sorted(path.stem for path in (Path(__file__).parent / "bench_parts").glob("[a-z]*.py"))
    if len(sys.argv) < 2 or sys.argv[1] not in parts:
        raise SystemExit(f"usage: python scripts/bench.py {'|'.join(parts)} [--help] [--json]")
    part = import_module(f"bench_parts.{sys.argv.pop(1)}")
    if sys.argv[1:2] == ["--call"]:
        result = getattr(part, sys.argv[2])(*json.loads(sys.argv[3]))
        sys.stdout.write(f"{json.dumps(result)}\n")  # at once: processes share it
        return
    if as_json := "--json" in sys.argv:
        sys.argv.remove("--json")

    @wraps(part.run)
    def run(**options: Any) -> None:
        show(part.run(**options), as_json)

    typer.run(run)


if __name__ == "__main__":
    main()
