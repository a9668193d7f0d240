"""`ropecli finetune`: trains a checkpoint on long sequences."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli.atomic import as_path, optional_path
from ropecli.errors import RecipeError
from ropecli.messages import Span, marked, progress_bar, say, say_opening, warn
from ropecli.options import DATA, OUTPUT, CheckpointName, OutputFolder, Revision
from ropecli.ranks import read_ranks
from ropecli.signature import Flag, Interval, command
from ropecli.training.recipe_files import RecipeFile, RecipeKeys, recipe_path

if TYPE_CHECKING:
    from ropecli.training.loop import TrainingProgress
    from ropecli.training.stages import Stage


@dataclass(frozen=True)
class FinetuneResult:
    """A finished fine-tuning, or the plan of a dry run, which has no output.

    steps: of all stages. stages: sentences of a dry run. sequences: those of --show-data in a dry run. new_steps,
    tokens, seconds, first_loss, last_loss: since the run began or resumed; losses in nats per token, None if no step
    was left to do.
    """

    checkpoint: str
    output: Path | None
    steps: int
    stages: tuple[str, ...] = ()
    sequences: tuple[Sequence[Span], ...] = ()
    new_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None

    def as_json(self) -> dict[str, Any]:
        sequences = [[span._asdict() for span in spans] for spans in self.sequences]
        output = str(self.output) if self.output else None
        return {**vars(self), "output": output, "stages": list(self.stages), "sequences": sequences}


@command
def finetune(
    checkpoint: CheckpointName,
    *,
    output: OutputFolder,
    recipe: RecipeFile = None,
    settings: Annotated[
        Mapping[str, Any] | None, Flag("--set", metavar="KEY=VALUE"), Doc("Any other key of the recipe; repeatable.")
    ] = None,
    revision: Revision = None,
    show_data: Annotated[
        int | None,
        Interval(ge=1, le=1000),
        Doc("Print the first N sequences as the model gets them, with what is trained on marked."),
        DATA,
    ] = None,
    dry_run: Annotated[bool, Doc("Print what would be done and write nothing."), OUTPUT] = False,
    resume: Annotated[bool, Doc("Resume from the last checkpoint in --output."), OUTPUT] = False,
    **shared: Unpack[RecipeKeys],
) -> FinetuneResult:
    """Fine-tune a checkpoint on long sequences.

    Several processes: `accelerate launch -m ropecli finetune ...`.
    """
    keys = {key: value for key, value in shared.items() if value not in (None, False)}
    further = dict(settings or {})
    if twice := [key for key in further if key in keys]:
        raise RecipeError(f"{twice[0]} was given twice: by its own option and by --set.")
    if not (shared["data"] or recipe or further.keys() & {"data", "mixture", "stages"}):
        raise RecipeError("Set --data SOURCE, the texts to train on, or --recipe with a recipe that names them.")
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.training.recipe_schema import make_recipe

    full_recipe = make_recipe(recipe_path(optional_path(recipe)), {**keys, **further})
    opened = open_checkpoint(checkpoint, weights=not dry_run, revision=revision)
    say_opening(checkpoint)
    from ropecli.training.stages import describe, plan_stages

    stages = plan_stages(opened, full_recipe)
    total = sum(stage.recipe.steps for stage in stages)
    sequences = _first_sequences(stages[0], show_data) if show_data and read_ranks().rank == 0 else ()
    if not dry_run:
        for spans in sequences:
            say(marked(spans))
        return _run(stages, as_path(output), resume, total)
    for stage in stages:
        number = f"stage {stage.number}: " if len(stages) > 1 else ""
        for warning in stage.warnings():
            warn(number + warning)
    sentences = describe(stages, read_ranks().count)
    return FinetuneResult(checkpoint, None, total, tuple(sentences), tuple(sequences))


def _first_sequences(stage: "Stage", count: int) -> list[list[Span]]:
    """The first sequences of a stage."""
    from ropecli.live.loading import load_tokenizer

    with progress_bar("tokenizing", None):
        stream = stage.open_data(load_tokenizer(stage.checkpoint))
    for sentence in stage.describe_data(stream):
        say(sentence)
    return stream.shown(count)


def _run(stages: Sequence["Stage"], output: Path, resume: bool, total: int) -> FinetuneResult:
    from ropecli.evaluation.processes import among_processes
    from ropecli.training.finetuning import Listener, run_stages
    from ropecli.training.launch import leave_processes

    again, start = "Run the same command with --resume to continue.", time.monotonic()
    done: list[TrainingProgress] = []
    with among_processes(again), progress_bar("preparing", total) as step:

        def on_step(progress: "TrainingProgress") -> None:
            done.append(progress)
            step(done=progress.step, text=f"loss {progress.loss:.3f}, {progress.tokens_per_second:,.0f} tokens/s")

        listener = Listener(say, on_step, lambda phase: step(phase=phase))
        run_stages(stages, output, resume=resume, listener=listener)
        leave_processes()
    return FinetuneResult(
        stages[0].checkpoint.name,
        output,
        total,
        new_steps=len(done),
        tokens=sum(progress.tokens for progress in done),
        seconds=time.monotonic() - start,
        first_loss=done[0].loss if done else None,
        last_loss=done[-1].loss if done else None,
    )
