"""Prints `ropecli plan`."""

from itertools import accumulate, chain
from typing import TYPE_CHECKING

from ropecli.cli.terminal import show_tables, tell
from ropecli.commands.plan import ENGINES, short_changes
from ropecli.table import Table

if TYPE_CHECKING:
    from ropecli.commands.plan import TrainingPlan

_COUNTS = {"parameters": "total", "trained": "trained", "active per token": "active_per_token"}


def render(plan: "TrainingPlan") -> None:
    from ropecli.training.memory_plan.setups import format_gb

    report = plan.report
    counts, memory, host = report["parameters"], report["memory"], report["host_memory"]
    groups = [
        [(name, f"{counts[key]:,}") for name, key in _COUNTS.items()],
        [
            *((name, format_gb(size)) for name, size in memory.items() if name not in ("total", "host")),
            ("on each GPU", format_gb(memory["total"])),
        ],
        [
            ("main memory of a machine, at loading", format_gb(host["loading"])),
            *([("in training", format_gb(host["training"]))] if host["training"] else []),
            ("at saving", format_gb(host["saving"])),
        ],
        [("KV cache of inference, bfloat16", format_gb(report["kv_cache"]))],
        [
            ("tokens per step", f"{report['tokens_per_step']:,}"),
            (f"tokens in {report['steps']} steps", f"{report['tokens']:,}"),
            ("FLOPs per step", f"{report['flops_per_step']:.3g}"),
            (f"time per step, MFU {report['mfu']:g}", _time(report["seconds_per_step"])),
            ("total time", _time(report["seconds"])),
        ],
    ]
    title = (
        f"{report['checkpoint']} at {report['length']:,} tokens on {report['gpus']} × {format_gb(report['gpu_memory'])}"
    )
    sections = frozenset(accumulate(map(len, groups)))
    ways = []
    for row in report["options"]:
        size = "" if row["bytes"] is None else format_gb(row["bytes"])
        settings = short_changes(row["changes"], checkpointing=row["gradient_checkpointing"])
        change = row["refused"] or ", ".join(settings) or "unchanged"
        machine = "" if row["host_memory"] is None else format_gb(max(row["host_memory"].values()))
        ways.append([row["adapter"], ENGINES[row["engine"]], change, size, machine, "yes" if row["fits"] else "no"])
    heads = ["adapter", "engine", "settings", "GPU", "machine", "fits"]
    show_tables([Table(title, ["", ""], list(chain(*groups)), sections=sections), Table("", heads, ways, names=3)])
    tell(f"{report['setting']}:\n{report['command']}")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"
