"""Prints `ropecli plan`."""

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from ropecli.cli.terminal import out, tell
from ropecli.commands.plan import ENGINES, short_changes

if TYPE_CHECKING:
    from ropecli.commands.plan import TrainingPlan


def render(plan: "TrainingPlan") -> None:
    from ropecli.training.memory_plan.setups import format_gb

    report = plan.report
    hardware = f"{report['gpus']} × {format_gb(report['gpu_memory'])}"
    title = f"{report['checkpoint']} at {report['length']:,} tokens on {hardware}"
    table = Table(title=escape(title), title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    counts, memory = report["parameters"], report["memory"]
    for name, key in (("parameters", "total"), ("trained", "trained"), ("active per token", "active_per_token")):
        table.add_row(name, f"{counts[key]:,}")
    table.add_section()
    for name, size in memory.items():
        if name not in ("total", "host"):
            table.add_row(name, format_gb(size))
    table.add_row("on each GPU", format_gb(memory["total"]))
    table.add_section()
    host = report["host_memory"]
    table.add_row("main memory of a machine, at loading", format_gb(host["loading"]))
    if host["training"]:
        table.add_row("in training", format_gb(host["training"]))
    table.add_row("at saving", format_gb(host["saving"]))
    table.add_section()
    table.add_row("KV cache of inference, bfloat16", format_gb(report["kv_cache"]))
    table.add_section()
    table.add_row("tokens per step", f"{report['tokens_per_step']:,}")
    table.add_row(f"tokens in {report['steps']} steps", f"{report['tokens']:,}")
    table.add_row("FLOPs per step", f"{report['flops_per_step']:.3g}")
    table.add_row(f"time per step, MFU {report['mfu']:g}", _time(report["seconds_per_step"]))
    table.add_row("total time", _time(report["seconds"]))
    out.print(table)
    ways = Table("adapter", "engine", "settings", "GPU", "machine", "fits")
    for row in report["options"]:
        size = "" if row["bytes"] is None else format_gb(row["bytes"])
        settings = short_changes(row["changes"], checkpointing=row["gradient_checkpointing"])
        told = row["refused"] or ", ".join(settings) or "unchanged"
        host = "" if row["host_memory"] is None else format_gb(max(row["host_memory"].values()))
        ways.add_row(row["adapter"], ENGINES[row["engine"]], told, size, host, "yes" if row["fits"] else "no")
    out.print(ways)
    tell(f"{report['setting']}:\n{report['command']}")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"
