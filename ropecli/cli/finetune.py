"""ropecli finetune: train a patched checkpoint on sequences of its extended length."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropecli.cli.options import Checkpoint, Revision

if TYPE_CHECKING:
    from ropecli.checkpoint.opening import Checkpoint as Opened
    from ropecli.training.recipe import Recipe


def command(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    recipe_file: Annotated[Path | None, typer.Option("--recipe", "-r", help="A YAML recipe; see recipes/.")] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="'demo-train', a file or folder, or a Hub dataset id.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="Of tables, the column that holds the text.")] = None,
    split: Annotated[str | None, typer.Option(help="Of a Hub dataset; 'train' by default.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence; by default the context length.")] = None,
    sequences: Annotated[str | None, typer.Option(help="long, packed or concat.")] = None,
    positions: Annotated[str | None, typer.Option(help="full, pose or randomized.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the weights.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per process and forward pass.")] = None,
    gradient_accumulation: Annotated[int | None, typer.Option(help="Forward passes per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", "--lr", help="Peak rate of AdamW.")] = None,
    adapter: Annotated[
        str | None, typer.Option(help="lora, lora-plus (and embeddings and norms) or qlora; by default, all weights.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option(help="A source to measure perplexity on while training.")] = None,
    seed: Annotated[int | None, typer.Option(help="Order of the sequences.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the recipe; repeatable.")
    ] = None,
    revision: Revision = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and write nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUTPUT.")] = False,
) -> None:
    """Fine-tune a checkpoint on long sequences; start it with `accelerate launch -m ropecli` for several processes."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.terminal import err, out, speak_from_first_process, warn

    speak_from_first_process()
    options = {
        "data": data,
        "text_column": text_column,
        "split": split,
        "length": length,
        "sequences": sequences,
        "positions": positions,
        "steps": steps,
        "batch_size": batch_size,
        "gradient_accumulation": gradient_accumulation,
        "learning_rate": learning_rate,
        "adapter": adapter,
        "eval_data": eval_data,
        "seed": seed,
    }
    recipe = _recipe(recipe_file, options, settings)
    opened = open_checkpoint(checkpoint, weights=not dry_run, revision=revision)
    if dry_run:
        from ropecli.training.stages import describe, plan_stages

        stages = plan_stages(opened, recipe)
        for sentence in describe(stages, int(os.environ.get("WORLD_SIZE", "1"))):
            out.print(sentence, markup=False, soft_wrap=True)
        for stage in stages:
            number = f"stage {stage.number}: " if len(stages) > 1 else ""
            for warning in stage.warnings:
                warn(number + warning)
        return
    _run(opened, recipe, output, resume, err)
    total = sum(run.steps for run in recipe.runs)
    out.print(f"{checkpoint} → {output}: {total} step{'s'[: total > 1]}", markup=False, soft_wrap=True)


def _recipe(file: Path | None, options: dict[str, Any], settings: list[str] | None) -> "Recipe":
    from ropecli.cli.terminal import parse_settings
    from ropecli.errors import RecipeError
    from ropecli.training.recipe import make_recipe

    others = parse_settings(settings)
    if twice := [key for key in others if options.get(key) is not None]:
        raise RecipeError(f"{twice[0]} was given by its own option and by --set; once is meant.")
    return make_recipe(file, {**options, **others})


def _run(opened: "Opened", recipe: "Recipe", output: Path, resume: bool, console: Any) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ropecli.evaluation.processes import among_processes
    from ropecli.training.stages import run_stages

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    again = "Run the same command with --resume to continue."
    bars = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    with among_processes(again), bars as bar:
        task = bar.add_task("fine-tuning", total=sum(run.steps for run in recipe.runs))

        def on_step(progress) -> None:
            text = f"loss {progress.loss:.3f}  {progress.tokens_per_second:,.0f} tokens/s"
            bar.update(task, completed=progress.step, description=text)

        def say(message: str) -> None:
            bar.console.print(message, markup=False, soft_wrap=True)

        run_stages(opened, recipe, output, resume=resume, say=say, on_step=on_step)
        _leave_processes()


def _leave_processes() -> None:
    """Of a launch of several: one that ends while others still speak to it may abort, or make them abort."""
    import gc

    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        gc.collect()  # what holds on to the group
        distributed.barrier()
        distributed.destroy_process_group()
