"""Runs one of the benchmarks in bench_parts/ and prints its tables as Markdown.

    python scripts/bench.py plan             # one of: plan, train
    python scripts/bench.py plan --help      # what it compares, and its options
    python scripts/bench.py plan --json      # {title: rows}

Its function `run` yields (title, row) pairs. Memory is measured in new processes.
"""

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

Rows = Iterator[tuple[str, dict[str, Any]]]
"""Titles of tables, and rows as {column: value}. The first column is a label."""


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a part's function in a new process. Arguments and result are made of what JSON has."""
    call = [Path(inspect.getfile(function)).stem, "--call", function.__name__, json.dumps(arguments)]
    run = subprocess.run([sys.executable, __file__, *call], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def memory_meter() -> Callable[[], float]:
    """Returns a function: the peak of this process since now, above what it holds now, MiB."""
    import psutil
    import torch
    from peak_memory import peak_memory, reset_peak

    before, cpu = psutil.Process().memory_info().rss, torch.device("cpu")
    reset_peak(cpu)
    return lambda: (peak_memory(cpu) - before) / 2**20


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
        print(json.dumps(result))
        return
    if as_json := "--json" in sys.argv:
        sys.argv.remove("--json")

    @wraps(part.run)
    def run(**options: Any) -> None:
        show(part.run(**options), as_json)

    typer.run(run)


if __name__ == "__main__":
    main()
