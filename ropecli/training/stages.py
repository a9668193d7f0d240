"""Plans and runs the stages of a recipe. Each stage patches if the recipe says so, and starts from the last result.

OUTPUT/run.yaml            source and all stages; resumed only with the same
OUTPUT/stages/N-patched/   what stage N trains: hard links and its own config.json; removed when the stage is done
OUTPUT/stages/N/           stage N, a run like any other (output/), kept as a checkpoint
OUTPUT/                    at the end the last stage's checkpoint, in place of its folder

Source of the form: YaRN trains s = 32 on from s = 16 (arXiv:2309.00071, section 4.1); EasyContext and ProLong
(arXiv:2410.02660) raise base and length in turn.
"""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ropecli.atomic import new_file
from ropecli.attention.patching import patch_to, with_layout
from ropecli.checkpoint.opening import CONFIG, PROVENANCE, Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import read_state
from ropecli.errors import MethodError, OutputError, PatchError, RecipeError, RopecliError
from ropecli.scaling.spec import make_spec
from ropecli.training.finetuning import beyond_context_length, finetune_checkpoint, settle_lengths, too_short_for_method
from ropecli.training.finished_weights import clear_finished, finished_step
from ropecli.training.recipe import Patch, Recipe, Source
from ropecli.training.refusals import refuse_method_conflicts, saved_method
from ropecli.training.run_folder import RUN, begin_run, lock_output, refuse_foreign

STAGES = "stages"
_PATIENCE = 3600.0
"""Seconds that the other processes wait for a patch: without hard links it copies the weights."""


@dataclass(frozen=True)
class Stage:
    """One run of a recipe. number: from 1. plan: the patch that it begins with, if any. in_effect: the patch that it
    trains with, its own or an earlier stage's; None for the checkpoint as it is.

    length: tokens of a sequence. reach: how far positions with gaps may go, tokens. warnings: to show before it runs.
    """

    number: int
    recipe: Recipe
    plan: PatchPlan | None
    length: int
    reach: int
    warnings: tuple[str, ...] = ()
    in_effect: PatchPlan | None = None

    def sequences_per_step(self, processes: int = 1) -> int:
        """processes: those that read different sequences."""
        return self.recipe.batch_size * self.recipe.gradient_accumulation * processes

    def tokens_per_step(self, processes: int = 1) -> int:
        return self.sequences_per_step(processes) * self.length


def plan_stages(checkpoint: Checkpoint, recipe: Recipe) -> list[Stage]:
    """What the recipe would do, from configs alone; writes nothing.

    Each patch is planned from the true pretraining length, so that a factor means the same in every stage; a
    relative-position method is tried on a small model of the architecture. Raises what make_plan, with_layout and
    settle_lengths raise, naming the stage, and RecipeError for what such a method does not go with.
    """
    runs = recipe.runs
    stages: list[Stage] = []
    in_effect: PatchPlan | None = None
    for number, run in enumerate(runs, 1):
        try:
            plan = _plan_patch(checkpoint, run.patch) if run.patch else None
            in_effect = plan or in_effect
            method = saved_method(checkpoint, in_effect)
            refuse_method_conflicts(run, method)
            length, reach = settle_lengths(run, checkpoint, in_effect)
            if run.save == "adapter" and number < len(runs):
                raise RecipeError("save: adapter leaves the next stage no whole checkpoint to begin with; use merged.")
        except RopecliError as error:
            raise error if len(runs) == 1 else type(error)(f"stage {number} of {len(runs)}: {error}") from error
        context_length = in_effect.target_length if in_effect else read_state(checkpoint).context_length
        warnings = (
            *(plan.warnings if plan else ()),
            *beyond_context_length(run, length, reach, context_length),
            *too_short_for_method(length, method),
        )
        stages.append(Stage(number, run, plan, length, reach, warnings, in_effect))
    return stages


def _plan_patch(checkpoint: Checkpoint, patch: Patch) -> PatchPlan:
    if patch.factor is None and patch.target_length is None and patch.method != "none":
        raise MethodError(f"patch: {patch.method} needs factor or target_length.")
    spec = make_spec(patch.method, 1.0 if patch.factor is None else patch.factor, patch.params)
    plan = make_plan(
        checkpoint,
        spec,
        target_length=patch.target_length,
        choose_factor=patch.factor is None,
        original_length=patch.original_length,
    )
    if plan.unwritable:
        raise PatchError(plan.unwritable)
    return with_layout(plan)


def describe(stages: list[Stage], processes: int = 1) -> list[str]:
    """A sentence for each stage. processes: those that read different sequences."""
    return [_sentence(stage, len(stages), processes) for stage in stages]


def _sentence(stage: Stage, count: int, processes: int) -> str:
    run, tokens = stage.recipe, stage.tokens_per_step(processes)
    gaps = "" if run.positions == "full" else f", {run.positions} positions up to {stage.reach:,}"
    return "; ".join(
        [
            _heading(stage, count),
            f"sequences of {stage.length:,} tokens{gaps}, from {_data_in_words(run.sources)}",
            f"{run.steps:,} steps of {stage.sequences_per_step(processes):,} sequences: {tokens:,} tokens a step, "
            f"{run.steps * tokens:,} in all",
        ]
    )


def _heading(stage: Stage, count: int) -> str:
    number = f"stage {stage.number} of {count}: " if count > 1 else ""
    return number + (_patch_in_words(stage.plan) if stage.plan else "no patch")


def _patch_in_words(plan: PatchPlan) -> str:
    remapping = plan.ropes[plan.scaled[0]].remapping
    settled = remapping.params if remapping else plan.spec.params
    params = ", ".join(f"{key} {value}" for key, value in settled.items())
    return (
        f"{plan.spec.method} ×{plan.spec.factor:g}{f' ({params})' if params else ''} to {plan.target_length:,} tokens"
    )


def _data_in_words(sources: tuple[Source, ...]) -> str:
    total = sum(source.weight for source in sources)
    shares = [f" {source.weight / total:.0%}" if len(sources) > 1 else "" for source in sources]
    return " + ".join(
        f"{source.data} ({source.sequences}){share}" for source, share in zip(sources, shares, strict=True)
    )


def run_stages(
    checkpoint: Checkpoint,
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda message: None,
    on_step: Callable[[Any], None] = lambda progress: None,
) -> None:
    """Does what `recipe` says, into the folder `output`, which stock transformers then loads.

    A single run without a patch is finetune_checkpoint's. on_step: its TrainingProgress, with the steps counted over
    all stages. Of several processes the first one patches and the others wait, so `output` must be on a disk that they
    share. Raises what finetune_checkpoint and patch_to raise; nothing is trained where a later patch has a fault.
    """
    runs = recipe.runs
    if len(runs) == 1 and runs[0].patch is None:
        finetune_checkpoint(checkpoint, runs[0], output, resume=resume, say=say, on_step=on_step)
        return
    stages = plan_stages(checkpoint, recipe)
    first = int(os.environ.get("RANK", "0")) == 0
    if first:
        refuse_foreign(output, resume)
    with lock_output(output) if first else nullcontext():
        if first:
            begin_run(output, {"source": checkpoint.origin(), "recipe": recipe.model_dump(mode="json")}, resume)
            _tell(checkpoint, stages, output, say)
        _run(checkpoint, stages, output, first, say if first else lambda message: None, on_step)


def _tell(checkpoint: Checkpoint, stages: list[Stage], output: Path, say: Callable[[str], None]) -> None:
    if kept := len(stages) - 1:
        size = sum(path.stat().st_size for path in checkpoint.weight_files()) / 2**30
        say(f"Each earlier stage's checkpoint is kept in {output / STAGES}: {kept} × {size:.3g} GiB.")
    for stage in stages:
        for warning in stage.plan.warnings if stage.plan else ():
            say(f"warning: {f'stage {stage.number}: ' if kept else ''}{warning}")


def _run(
    checkpoint: Checkpoint,
    stages: list[Stage],
    output: Path,
    first: bool,
    say: Callable[[str], None],
    on_step: Callable[[Any], None],
) -> None:

    steps, trained = 0, None
    for stage in stages:
        heading = _heading(stage, len(stages))
        folder = stage_folder(output, stage.number)
        # in this order: the first process fills OUTPUT before it removes the last stage's folder
        if finished_step(folder) is not None or finished_step(output) is not None:
            say(f"{heading}: done already")
        else:
            say(heading)
            source = open_checkpoint(trained, weights=True) if trained else checkpoint
            source = _patched(source, stage, patched_folder(folder), first, say)
            counted = partial(_count_on, on_step, steps)
            # the folder is this run's own, so what is there is gone on with
            finetune_checkpoint(source, stage.recipe, folder, resume=True, say=say, on_step=counted)
        if first:
            tidy(folder, keep_patched=stage.recipe.save == "adapter")
        steps, trained = steps + stage.recipe.steps, folder
    if first:
        move_up(stage_folder(output, len(stages)), output)


def _count_on(on_step: Callable[[Any], None], before: int, progress: Any) -> None:
    on_step(replace(progress, step=before + progress.step))


def _patched(checkpoint: Checkpoint, stage: Stage, folder: Path, first: bool, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that the stage trains: patched as it asks, or as it is."""
    if stage.recipe.patch is None:
        return checkpoint
    if first and not folder.exists():  # where it is there, it is whole
        patch_to(_plan_patch(checkpoint, stage.recipe.patch), folder, say=say)
    wait_for(folder)
    return open_checkpoint(folder, weights=True)


def stage_folder(output: Path, number: int) -> Path:
    return output / STAGES / str(number)


def patched_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-patched")


def wait_for(patched: Path) -> None:
    """Until the first process has written it, by looking at the disk: between stages no process group is there.

    Raises OutputError when it takes too long.
    """
    until = time.monotonic() + _PATIENCE
    while not (patched / CONFIG).is_file():
        if time.monotonic() > until:
            raise OutputError(
                f"{patched} did not appear within {_PATIENCE / 60:.0f} minutes. The first process writes it: --output "
                "must be on a disk that all processes share."
            )
        time.sleep(0.1)


def tidy(folder: Path, *, keep_patched: bool) -> None:
    """Removes what only an unfinished stage needs. keep_patched: it may be the base that an adapter names."""

    if folder.is_dir():
        with lock_output(folder):  # its lock, if a kill left it there, goes with ours
            clear_finished(folder)
    if not keep_patched:
        shutil.rmtree(patched_folder(folder), ignore_errors=True)


def move_up(folder: Path, output: Path) -> None:
    """Puts the last stage's files into OUTPUT, the two that mark it as finished at the end, and removes its folder.

    A kill at any moment leaves one of both folders finished, and a second call goes on.
    """

    marks = (PROVENANCE, CONFIG)
    if finished_step(output) is None:
        try:
            for path in sorted(folder.iterdir()):
                if path.name not in (RUN, *marks) and not path.name.startswith("."):
                    path.replace(output / path.name)
        except OSError as error:
            raise OutputError(f"{output} could not be written: {error.strerror}. --resume tries again.") from error
        for name in marks:
            with new_file(output / name) as partial:
                shutil.copy(folder / name, partial)
    shutil.rmtree(folder, ignore_errors=True)
    if all(path.name.startswith(".") for path in folder.parent.iterdir()):  # what a killed patch left
        shutil.rmtree(folder.parent, ignore_errors=True)
