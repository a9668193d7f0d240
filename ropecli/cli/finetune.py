"""ropecli finetune: train a patched checkpoint on sequences of its extended length."""

from pathlib import Path
from typing import Annotated

import typer

from ropecli.cli.options import Checkpoint, Revision


def command(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    recipe_file: Annotated[Path | None, typer.Option("--recipe", "-r", help="A YAML recipe; see recipes/.")] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="'demo-train', a file or folder, or a Hub dataset id.")
    ] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence; the extended window by default.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates of the weights.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per process and forward pass.")] = None,
    gradient_accumulation: Annotated[int | None, typer.Option(help="Forward passes per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", "--lr", help="Peak rate of AdamW.")] = None,
    seed: Annotated[int | None, typer.Option(help="Order of the sequences.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other key of the recipe; repeatable.")
    ] = None,
    revision: Revision = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in OUTPUT.")] = False,
) -> None:
    """Fine-tune a checkpoint on long sequences; start it with `accelerate launch -m ropecli` for several processes."""
    from ropecli.checkpoint.reading import open_checkpoint
    from ropecli.cli.terminal import err, out, parse_settings, speak_from_first_process
    from ropecli.errors import RecipeError
    from ropecli.finetune.recipe import make_recipe

    speak_from_first_process()
    options = {
        "data": data,
        "length": length,
        "steps": steps,
        "batch_size": batch_size,
        "gradient_accumulation": gradient_accumulation,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    others = parse_settings(settings)
    if twice := [key for key in others if options.get(key) is not None]:
        raise RecipeError(f"{twice[0]} was given by its own option and by --set; once is meant.")
    recipe = make_recipe(recipe_file, {**options, **others})
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    _run(opened, recipe, output, resume, err)
    out.print(f"{checkpoint} → {output}: {recipe.steps} step{'s'[: recipe.steps > 1]}", markup=False, soft_wrap=True)


def _run(opened, recipe, output: Path, resume: bool, console) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ropecli.finetune.training import finetune_checkpoint

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("fine-tuning", total=recipe.steps)

        def on_step(progress) -> None:
            text = f"loss {progress.loss:.3f}  {progress.tokens_per_second:,.0f} tokens/s"
            bar.update(task, completed=progress.step, description=text)

        def say(message: str) -> None:
            bar.console.print(message, markup=False, soft_wrap=True)

        try:
            finetune_checkpoint(opened, recipe, output, resume=resume, say=say, on_step=on_step)
        except KeyboardInterrupt:
            say(f"Stopped. The last checkpoint in {output} stays; the same command with --resume goes on from it.")
            raise
