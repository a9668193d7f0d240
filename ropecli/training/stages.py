"""Plans a recipe's stages and runs them in order. Each stage trains the previous stage's result, patched if it says so.

OUTPUT/run.yaml            source and all stages; resuming requires the same ones
OUTPUT/stages/N-patched/   input of stage N: hard links and its own config.json; removed after the stage
OUTPUT/stages/N/           stage N, a run like any other (run_folder.py), kept as a checkpoint
OUTPUT/                    at the end the last stage's checkpoint, moved here from its folder

Staged training follows YaRN, which trains s = 32 from s = 16 (arXiv:2309.00071, section 4.1), and EasyContext and
ProLong (arXiv:2410.02660), which raise base and length step by step.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.atomic import sole_use
from ropecli.attention.patching import patch_to, with_layout
from ropecli.checkpoint.files import RUN, STAGES
from ropecli.checkpoint.opening import CONFIG, PROVENANCE, Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import read_state
from ropecli.config.fields import section_of
from ropecli.data.sampling import refuse_impossible_positions
from ropecli.errors import MethodError, OutputError, RecipeError, RopecliError
from ropecli.evaluation.protocols import short_context
from ropecli.live.stock_transformers import read_stock_config, refuse_encoder
from ropecli.messages import size
from ropecli.names import LENGTH_ONLY, refuse_held_out
from ropecli.ranks import read_ranks
from ropecli.scaling.spec import make_spec
from ropecli.training.finetuning import SILENT, Listener, finetune_checkpoint
from ropecli.training.finished_weights import clear_finished, finished_step
from ropecli.training.recipe_schema import Patch, Recipe
from ropecli.training.refusals import refuse_method_conflicts, why_unpackable
from ropecli.training.run_folder import LOCK, begin_run, refuse_foreign

_PATIENCE = 3600.0
"""Seconds that the other processes wait for a patch, which copies the weights if it cannot hard-link."""


@dataclass(frozen=True)
class Stage:
    """One run of a recipe, with the lengths that follow from the checkpoint.

    number: from 1. plan: the stage's own patch, if any. in_effect: the patch that it trains with, its own or an earlier
    stage's; None for an unchanged checkpoint. length: tokens per sequence. position_span: tokens that positions
    with gaps may span. pretraining_length: tokens. unpackable: why conversations cannot be packed; empty if they can.
    warnings: shown before it runs.
    """

    number: int
    recipe: Recipe
    plan: PatchPlan | None
    in_effect: PatchPlan | None
    length: int
    position_span: int
    pretraining_length: int
    unpackable: str = ""
    warnings: tuple[str, ...] = ()

    def sequences_per_step(self, processes: int = 1) -> int:
        groups = max(1, processes // self.recipe.context_parallel_size)
        return self.recipe.batch_size * self.recipe.gradient_accumulation * groups

    def tokens_per_step(self, processes: int = 1) -> int:
        return self.sequences_per_step(processes) * self.length


def plan_stages(checkpoint: Checkpoint, recipe: Recipe) -> list[Stage]:
    """Plan all stages from configs only, without writing anything.

    Each patch is relative to the true pretraining length, so a factor means the same in every stage. A distance method
    is tested on a small model of the architecture. Raises the errors of make_plan and with_layout, DataError and
    RecipeError, naming the stage.
    """
    refuse_encoder(read_stock_config(checkpoint.folder, checkpoint.name), checkpoint.name)
    runs = recipe.runs
    stages: list[Stage] = []
    in_effect: PatchPlan | None = None
    for number, run in enumerate(runs, 1):
        try:
            if run.save == "adapter" and number < len(runs):
                raise RecipeError(
                    "save: adapter does not write the whole checkpoint that the next stage needs. Use save: merged."
                )
            plan = _plan_patch(checkpoint, run.patch) if run.patch else None
            in_effect = plan or in_effect
            stages.append(_plan_stage(checkpoint, run, number, plan, in_effect))
        except RopecliError as error:
            raise error if len(runs) == 1 else type(error)(f"stage {number} of {len(runs)}: {error}") from error
    return stages


def _plan_patch(checkpoint: Checkpoint, patch: Patch) -> PatchPlan:
    if patch.factor is None and patch.target_length is None and patch.method not in LENGTH_ONLY:
        raise MethodError(f"patch: {patch.method} needs factor or target_length.")
    spec = make_spec(patch.method, 1.0 if patch.factor is None else patch.factor, patch.params)
    plan = make_plan(
        checkpoint,
        spec,
        target_length=patch.target_length,
        choose_factor=patch.factor is None,
        original_length=patch.original_length,
    )
    return with_layout(plan)


def _plan_stage(
    checkpoint: Checkpoint, recipe: Recipe, number: int, plan: PatchPlan | None, in_effect: PatchPlan | None
) -> Stage:
    """Resolve the lengths. Sequences default to the context length, with gaps to the pretraining length."""
    for source in recipe.sources:
        refuse_held_out(source.data)
    state = read_state(checkpoint)
    positions = (in_effect or state).positions
    pretraining_length, context_length = positions.pretraining_length, positions.context_length
    position_span = recipe.window or context_length
    length = recipe.length or (context_length if recipe.positions == "full" else pretraining_length)
    refuse_impossible_positions(recipe.positions, length, position_span, recipe.position_parts)
    if recipe.loss == "longce" and length <= (first := short_context(pretraining_length).first):
        raise RecipeError(
            f"length is {length}; loss: longce needs more than {first}, the pretraining length and a quarter."
        )
    method = in_effect.remapping if in_effect else state.saved_remapping
    refuse_method_conflicts(recipe, method)
    longest = length if recipe.positions == "full" else position_span
    of_patch = [finding.message for finding in plan.findings] if plan else []
    warnings = [*of_patch, *_warnings(checkpoint, recipe, longest, context_length)]
    if method:
        last, keys = np.array([length - 1]), np.arange(length)
        if np.array_equal(method.remapping().distances(last, keys), last[:, None] - keys):
            warnings.append(f"{method.method} has no effect on sequences of {length} tokens. Set a greater length.")
    config = in_effect.config if in_effect else checkpoint.config
    unpackable = why_unpackable(recipe, config, method)
    lengths = (length, position_span, pretraining_length)
    return Stage(number, recipe, plan, in_effect, *lengths, unpackable, tuple(warnings))


def _warnings(checkpoint: Checkpoint, recipe: Recipe, longest: int, context_length: int) -> Iterator[str]:
    """longest: tokens that a sequence's positions span."""
    if longest > context_length:
        what = f"sequences of {longest} tokens" if recipe.positions == "full" else f"positions up to {longest}"
        yield f"{what} exceed the checkpoint's context length, {context_length}: patch it first."
    if recipe.warmup_steps >= recipe.steps:
        yield f"warmup_steps is {recipe.warmup_steps} of {recipe.steps} steps: the peak learning rate is never reached."
    if section_of(checkpoint.config).get("router_aux_loss_coef"):
        yield "training uses only the next-token loss, without the routers' load-balancing loss."


def describe(stages: list[Stage], processes: int = 1) -> list[str]:
    """One sentence per stage."""
    sentences = []
    for stage in stages:
        run, tokens = stage.recipe, stage.tokens_per_step(processes)
        gaps = "" if run.positions == "full" else f", {run.positions} positions up to {stage.position_span:,}"
        weights = sum(source.weight for source in run.sources)
        data = " + ".join(
            f"{source.data}{f' ({source.sequences})' if source.sequences else ''}"
            + (f" {source.weight / weights:.0%}" if run.mixture else "")
            for source in run.sources
        )
        sentences.append(
            f"{_heading(stage, len(stages))}; sequences of {stage.length:,} tokens{gaps}, from {data}; {run.steps:,} "
            f"steps of {stage.sequences_per_step(processes):,} sequences: {tokens:,} tokens per step, "
            f"{run.steps * tokens:,} in total"
        )
    return sentences


def _heading(stage: Stage, count: int) -> str:
    number = f"stage {stage.number} of {count}: " if count > 1 else ""
    if stage.plan is None:
        return f"{number}no patch"
    spec = stage.plan.spec
    return f"{number}{spec.label} to {stage.plan.positions.context_length:,} tokens"


def run_stages(
    checkpoint: Checkpoint, recipe: Recipe, output: Path, *, resume: bool = False, listener: Listener = SILENT
) -> None:
    """Run all stages of a recipe into the folder `output`, which stock transformers can then load.

    listener: its steps are counted over all stages. With several processes the first one patches and the others wait,
    so `output` must be on a disk that they share. Raises the errors of plan_stages, before anything is trained, and
    those of patch_to and finetune_checkpoint.
    """
    stages = plan_stages(checkpoint, recipe)
    first = read_ranks().rank == 0
    listener = listener if first else SILENT
    if first:
        refuse_foreign(output, resume)
    for stage in stages:
        for warning in stage.warnings:
            listener.say(f"warning: {f'stage {stage.number}: ' if len(stages) > 1 else ''}{warning}")
    if len(stages) == 1 and stages[0].plan is None:
        _finetune(checkpoint, stages[0], output, listener, resume=resume)
        return
    with sole_use(output / LOCK, output) if first else nullcontext():
        if first:
            settings = {"source": checkpoint.origin(), "recipe": recipe.model_dump(mode="json")}
            begin_run(output, settings, resume)
        if kept := len(stages) - 1:
            weights = size(sum(path.stat().st_size for path in checkpoint.weight_files()))
            listener.say(f"Keeping the checkpoints of earlier stages in {output / STAGES}: {kept} × {weights}.")
        _run_in_turn(checkpoint, stages, output, first, listener)


def _finetune(checkpoint: Checkpoint, stage: Stage, output: Path, listener: Listener, *, resume: bool) -> None:
    finetune_checkpoint(
        checkpoint,
        stage.recipe,
        output,
        listener,
        length=stage.length,
        position_span=stage.position_span,
        unpackable=stage.unpackable,
        resume=resume,
    )


def _run_in_turn(checkpoint: Checkpoint, stages: list[Stage], output: Path, first: bool, listener: Listener) -> None:
    steps, trained = 0, None
    for stage in stages:
        heading = _heading(stage, len(stages))
        folder = output / STAGES / str(stage.number)
        patched = folder.with_name(f"{stage.number}-patched")
        # check in this order: the first process fills OUTPUT before it removes the last stage's folder
        if finished_step(folder) is not None or finished_step(output) is not None:
            listener.say(f"{heading}: already finished")
        else:
            listener.say(heading)
            source = open_checkpoint(trained, weights=True) if trained else checkpoint
            if stage.recipe.patch:
                if first and not patched.exists():  # if it exists, it is complete
                    patch_to(_plan_patch(source, stage.recipe.patch), patched, say=listener.say)
                _wait_for(patched)
                source = open_checkpoint(patched, weights=True)

            def counted(progress: Any, before: int = steps) -> None:
                listener.on_step(replace(progress, step=before + progress.step))

            # the folder belongs to this run, so resume what it contains
            _finetune(source, stage, folder, listener._replace(on_step=counted), resume=True)
        if first:
            clear_finished(folder)
            (folder / LOCK).unlink(missing_ok=True)  # may be left after a kill
            if stage.recipe.save != "adapter":  # an adapter's base is the patched folder
                shutil.rmtree(patched, ignore_errors=True)
        steps, trained = steps + stage.recipe.steps, folder
    if first:
        _move_up(output / STAGES / str(len(stages)), output)


def _wait_for(patched: Path) -> None:
    """Wait until the first process has written it; no process group exists between stages. Raises OutputError."""
    until = time.monotonic() + _PATIENCE
    while not (patched / CONFIG).is_file():
        if time.monotonic() > until:
            raise OutputError(
                f"{patched} did not appear within {_PATIENCE / 60:.0f} minutes. The first process writes it, so "
                "--output must be on a disk that all processes share."
            )
        time.sleep(0.1)


def _move_up(folder: Path, output: Path) -> None:
    """Move the last stage's files into OUTPUT, config.json last, and remove its folder.

    After a kill at any moment one of the two folders is finished, and a second call continues.
    """
    if finished_step(output) is None:
        for path in folder.iterdir():
            if path.name not in (RUN, PROVENANCE, CONFIG) and not path.name.startswith("."):
                path.replace(output / path.name)
        shutil.copy(folder / PROVENANCE, output / PROVENANCE)
        (folder / CONFIG).replace(output / CONFIG)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # earlier stages are kept
        folder.parent.rmdir()
