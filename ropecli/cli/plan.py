"""ropecli plan: what fine-tuning takes in memory, operations and time, and which settings fit, before it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropecli.cli.options import AsJson, Checkpoint, Revision

if TYPE_CHECKING:
    from ropecli.training.memory_plan.setups import Setup


def command(
    checkpoint: Checkpoint,
    length: Annotated[
        int | None, typer.Option(help="Tokens per sequence; the recipe's, or the context length.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="Of one kind, on which the training runs.")] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Of one GPU: 80GB is 80 × 10⁹ bytes, 80GiB 80 × 2³⁰.")] = "80GB",
    recipe_file: Annotated[Path | None, typer.Option("--recipe", "-r", help="A YAML recipe; see recipes/.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the recipe; repeatable.")
    ] = None,
    mfu: Annotated[float, typer.Option(help="Model FLOP utilisation, 0 to 1; 0.4 is usual for long sequences.")] = 0.4,
    gpu: Annotated[str, typer.Option(help="Whose operations a second: a100, h100, h200, b200, l40s ...")] = "h100",
    gpu_flops: Annotated[float | None, typer.Option(help="In place of --gpu: bfloat16 operations a second.")] = None,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Say what fine-tuning takes before it runs: memory part by part, operations, time, and which settings fit.

    Needs config.json alone: no weights are read and no memory is taken. GB are 10⁹ bytes. A recipe with stages is
    planned by its longest stage.
    """
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.terminal import parse_settings, print_json, warn
    from ropecli.errors import RecipeError
    from ropecli.training.memory_plan.estimate import GPUS
    from ropecli.training.memory_plan.setups import parse_size
    from ropecli.training.recipe import make_recipe
    from ropecli.training.stages import plan_stages

    memory = parse_size(gpu_memory, "--gpu-memory")
    if not 1 <= gpus <= 65536:
        raise RecipeError(f"--gpus is {gpus}; a number from 1 on was expected.")
    if not 0 < mfu <= 1:
        raise RecipeError(f"--mfu is {mfu:g}; a share above 0, at most 1, was expected.")
    if length is not None and not 2 <= length <= 2**31:
        raise RecipeError(f"--length is {length}; a number of tokens from 2 on was expected.")
    if gpu_flops is None and gpu.lower() not in GPUS:
        raise RecipeError(f"--gpu {gpu} is not known; give one of {', '.join(GPUS)}, or --gpu-flops.")
    flops = GPUS[gpu.lower()] if gpu_flops is None else gpu_flops
    if not 0 < flops < float("inf"):
        raise RecipeError(f"--gpu-flops is {flops:g}; a number above 0 was expected, as 989e12.")
    given = {**parse_settings(settings), **({} if length is None else {"length": length})}
    # no data is read: without a recipe any name stands for it
    named = {} if recipe_file or given.keys() & {"data", "mixture"} else {"data": "DATA"}
    opened = open_checkpoint(checkpoint, revision=revision)
    stages = plan_stages(opened, make_recipe(recipe_file, {**named, **given}))
    stage = max(stages, key=lambda one: one.length)
    if stage.length > stage.reach:
        warn(f"{stage.length} tokens exceed the context length of {opened.name}, {stage.reach}: patch it first.")
    report = _plan(opened, stage, gpus, memory, flops, mfu, recipe_file, given)
    if as_json:
        print_json(report)
        return
    _show(report)


def _plan(opened, stage, gpus, memory, flops, mfu, recipe_file, given) -> dict[str, Any]:
    from ropecli.errors import RecipeError
    from ropecli.training.memory_plan import setups
    from ropecli.training.memory_plan.estimate import MemoryEstimator, compute_of
    from ropecli.training.memory_plan.model_shape import kv_cache, read_config
    from ropecli.training.memory_plan.setups import format_gb

    recipe, length = stage.recipe, stage.length
    config = read_config(opened, stage.in_effect)
    estimator = MemoryEstimator(config)
    found = setups.find_setups(estimator, recipe, length, gpus, memory)
    chosen = setups.best_setup(found)
    if chosen is None:
        least = min((one for one in found if not one.refused), key=lambda one: one.estimate.total)
        more = setups.setup_with_more_gpus(estimator, recipe, length, gpus, memory)
        hint = "No number of GPUs up to 4096 would do; shorten the sequences."
        if more:
            hint = f"{more.world} GPUs would do ({_named(more)}), or a shorter --length."
        raise RecipeError(
            f"Nothing fits: training at {length} tokens takes at least {format_gb(least.estimate.total)} on each of "
            f"{gpus} GPU{'s'[: gpus > 1]} ({_named(least)}); one has {format_gb(memory)}. {hint}"
        )
    compute = compute_of(estimator.shape, chosen.recipe, length, chosen.data_ranks)
    seconds = compute.seconds(gpus, flops, mfu)
    estimate = chosen.estimate
    return {
        "checkpoint": opened.name,
        "length": length,
        "gpus": gpus,
        "gpu_memory": memory,
        "parameters": {
            "total": estimator.shape.total,
            "trained": estimate.trained,
            "active_per_token": estimator.shape.active,
        },
        "kv_cache": kv_cache(config, estimator.shape, length),
        "setting": _named(chosen),
        "memory": {**estimate.parts(), "total": estimate.total, "moment": estimate.moment, "host": estimate.host},
        "activations": _activations(estimator, chosen, length),
        "tokens_per_step": compute.tokens,
        "tokens": compute.tokens * recipe.steps,
        "steps": recipe.steps,
        "flops_per_step": compute.flops,
        "flops": compute.flops * recipe.steps,
        "recomputed_flops_per_step": compute.recomputed,
        "mfu": mfu,
        "gpu_flops": flops,
        "seconds_per_step": seconds,
        "seconds": seconds * recipe.steps,
        "options": [_row(one) for one in found],
        "command": setups.launch_command(chosen, opened.name, length, str(recipe_file) if recipe_file else None, given),
    }


def _activations(estimator, chosen: "Setup", length: int) -> dict[str, int]:
    """Bytes that the layers keep on a GPU, by what is done about them."""
    sets = {
        "plain": {"gradient_checkpointing": False, "offload_activations": False},
        "checkpointing": {"gradient_checkpointing": True, "offload_activations": False},
        "offload": {"gradient_checkpointing": True, "offload_activations": True},
    }
    own = -(-length // chosen.world) if chosen.engine == "ulysses" else length
    kept = {}
    for name, keys in sets.items():
        seen = estimator.trace(chosen.recipe.model_copy(update=keys), own, chosen.engine)
        kept[name] = min(seen.kept, seen.hidden) if name == "offload" else seen.kept
    return kept


def _row(setup: "Setup") -> dict[str, Any]:
    return {
        "adapter": setup.changes.get("adapter", setup.recipe.adapter),
        "engine": setup.engine,
        "changes": setup.changes,
        "bytes": None if setup.refused else setup.estimate.total,
        "host": None if setup.refused else setup.estimate.host,
        "fits": setup.fits,
        "refused": setup.refused,
    }


def _named(setup: "Setup") -> str:
    ways = {"none": "all parameters", "lora": "LoRA", "lora-plus": "LoRA+", "qlora": "QLoRA"}
    return ", ".join([ways[setup.recipe.adapter], _ENGINES[setup.engine], *_changes(setup.changes)])


_ENGINES = {"one": "one GPU", "ddp": "DDP", "fsdp2": "FSDP2", "ulysses": "Ulysses"}


def _changes(changes: dict[str, Any]) -> list[str]:
    words = {
        "gradient_checkpointing": "checkpointing",
        "offload_activations": "offload",
        "optimizer": "8-bit AdamW",
    }
    return [words[key] for key in changes if key in words]


def _show(report: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from ropecli.cli.terminal import out
    from ropecli.training.memory_plan.setups import format_gb

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
        if name not in ("total", "moment", "host"):
            table.add_row(name, format_gb(size))
    table.add_row(f"on each GPU, at {memory['moment']}", format_gb(memory["total"]))
    if memory["host"]:
        table.add_row("in the CPU's memory, per process", format_gb(memory["host"]))
    table.add_section()
    for name, size in report["activations"].items():
        table.add_row(f"activations, {name}", format_gb(size))
    table.add_row("KV cache of inference, bfloat16", format_gb(report["kv_cache"]))
    table.add_section()
    table.add_row("tokens per step", f"{report['tokens_per_step']:,}")
    table.add_row(f"tokens in {report['steps']} steps", f"{report['tokens']:,}")
    table.add_row("FLOPs per step", f"{report['flops_per_step']:.3g}")
    table.add_row(f"time per step, MFU {report['mfu']:g}", _time(report["seconds_per_step"]))
    table.add_row("time in all", _time(report["seconds"]))
    out.print(table)
    ways = Table("adapter", "engine", "changes", "memory", "fits")
    for row in report["options"]:
        size = "" if row["bytes"] is None else format_gb(row["bytes"])
        changes = row["refused"] or ", ".join(_changes(row["changes"])) or "none"
        ways.add_row(row["adapter"], _ENGINES[row["engine"]], changes, size, "yes" if row["fits"] else "no")
    out.print(ways)
    out.print(f"{report['setting']}:\n{report['command']}", markup=False, soft_wrap=True)


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.3g} h"
