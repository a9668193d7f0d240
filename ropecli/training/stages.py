"""Plans a recipe's stages and runs them in order. Each stage trains the previous stage's result, patched if it says so.

OUTPUT/stages/N-patched/   input of stage N: hard links and its own config.json; removed after the stage
OUTPUT/stages/N/           stage N, a run like any other (run_folder.py), kept as a checkpoint
OUTPUT/                    the last stage

Staged training follows YaRN, which trains s = 32 from s = 16 (arXiv:2309.00071, section 4.1), and EasyContext and
ProLong (arXiv:2410.02660), which raise base and length step by step.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.atomic import sole_use
from ropecli.attention.patching import patch_to, with_layout
from ropecli.checkpoint.advice import how_to_read
from ropecli.checkpoint.files import RUN, STAGES
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import read_state
from ropecli.config.fields import section_of
from ropecli.data.sampling import refuse_impossible_positions
from ropecli.errors import MethodError, RecipeError, RopecliError
from ropecli.evaluation.protocols import short_context
from ropecli.live.stock_transformers import read_stock_config, refuse_encoder
from ropecli.messages import size
from ropecli.names import LENGTH_ONLY, refuse_held_out
from ropecli.ranks import read_ranks
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.training.finetuning import SILENT, Listener, finetune_checkpoint
from ropecli.training.finished_weights import clear_finished, is_finished
from ropecli.training.launch import Launch
from ropecli.training.recipe_schema import Patch, Recipe
from ropecli.training.refusals import refuse_method_conflicts, why_unpackable
from ropecli.training.run_folder import LOCK, refuse_foreign, refuse_other_run
from ropecli.training.validation import Scoring


@dataclass(frozen=True)
class Stage:
    """One run of a recipe, with the lengths that follow from the checkpoint.

    number: from 1. plan: the stage's own patch, if any. in_effect: the patch that it trains with, its own or an earlier
    stage's; None for an unchanged checkpoint. length: tokens per sequence. position_span: tokens that positions
    with gaps may span. pretraining_length: tokens. context_length: tokens that the checkpoint reads. spec: the scaling
    that it trains with. unpackable: why conversations cannot be packed; empty if they can. warnings: shown before it
    runs.
    """

    number: int
    recipe: Recipe
    plan: PatchPlan | None
    in_effect: PatchPlan | None
    length: int
    position_span: int
    pretraining_length: int
    context_length: int
    spec: ScalingSpec
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
    refuse_impossible_positions(recipe.positions, length, position_span, recipe.pose_chunks)
    if recipe.loss == "longce" and length <= (first := short_context(pretraining_length).first):
        raise RecipeError(
            f"--length is {length}; loss: longce needs more than {first}, the pretraining length and a quarter."
        )
    method = in_effect.remapping if in_effect else state.saved_remapping
    refuse_method_conflicts(recipe, method)
    longest = length if recipe.positions == "full" else position_span
    of_patch = [finding.message for finding in plan.findings] if plan else []
    warnings = [*of_patch, *_warnings(checkpoint, recipe, longest, context_length)]
    if method:
        last, keys = np.array([length - 1]), np.arange(length)
        if np.array_equal(method.remapping().distances(last, keys), last[:, None] - keys):
            warnings.append(f"{method.method} has no effect on sequences of {length} tokens. Use a greater --length.")
    config = in_effect.config if in_effect else checkpoint.config
    unpackable = why_unpackable(recipe, config, method)
    lengths = (length, position_span, pretraining_length, context_length)
    return Stage(number, recipe, plan, in_effect, *lengths, positions.main.spec, unpackable, tuple(warnings))


def _warnings(checkpoint: Checkpoint, recipe: Recipe, longest: int, context_length: int) -> Iterator[str]:
    """longest: tokens that a sequence's positions span."""
    if longest > context_length:
        what = f"sequences of {longest} tokens" if recipe.positions == "full" else f"positions up to {longest}"
        more = how_to_read(read_state(checkpoint), longest)
        yield f"{what} exceed the checkpoint's context length, {context_length}. {more}".rstrip()
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
        label = "unscaled" if stage.spec.method.name == "none" else stage.spec.label
        return f"{number}as it is: {label}, {stage.context_length:,} tokens"
    spec = stage.plan.spec
    return f"{number}{spec.label} to {stage.plan.positions.context_length:,} tokens"


def run_stages(
    checkpoint: Checkpoint,
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    listener: Listener = SILENT,
    scoring: Scoring | None = None,
) -> None:
    """Run all stages of a recipe into the folder `output`, which stock transformers can then load.

    listener: its steps are counted over all stages. scoring: instead of the recipe's eval_data. With several
    processes `output` must be on a disk that they share.
    Raises the errors of plan_stages, before anything is trained, and those of patch_to and finetune_checkpoint.
    """
    stages = plan_stages(checkpoint, recipe)
    first = read_ranks().rank == 0
    listener = listener if first else SILENT
    if first:
        refuse_foreign(output, resume)
    for stage in stages:
        for warning in stage.warnings:
            listener.say(f"warning: {f'stage {stage.number}: ' if len(stages) > 1 else ''}{warning}")
    with sole_use(output / LOCK, output) if first else nullcontext():
        if first:
            refuse_foreign(output, resume)  # another run may have used it until now
        if kept := len(stages) - 1:
            weights = size(sum(path.stat().st_size for path in checkpoint.weight_files()))
            listener.say(f"Keeping the checkpoints of earlier stages in {output / STAGES}: {kept} × {weights}.")
        _run_in_turn(checkpoint, recipe, stages, output, first, listener, scoring)


def _run_in_turn(
    checkpoint: Checkpoint,
    recipe: Recipe,
    stages: list[Stage],
    output: Path,
    first: bool,
    listener: Listener,
    scoring: Scoring | None,
) -> None:

    def after(steps: int) -> Listener:
        """Counts on from these steps."""
        return listener._replace(
            on_step=lambda progress: listener.on_step(replace(progress, step=steps + progress.step))
        )

    steps, source = 0, checkpoint
    whole = recipe.record()
    for stage in stages:
        folder = output if stage is stages[-1] else output / STAGES / str(stage.number)
        patched = output / STAGES / f"{stage.number}-patched"
        finished = is_finished(folder)
        if len(stages) > 1 or stage.plan:
            listener.say(_heading(stage, len(stages)))
        if stage.number > 1 and not finished:
            source = open_checkpoint(output / STAGES / str(stage.number - 1), weights=True)
        if first:
            # finetune_checkpoint compares the source of an unfinished one
            origin = {"source": checkpoint.origin()} if finished and stage.number == 1 else {}
            refuse_other_run(folder, {**origin, "recipe": whole})
        try:
            if finished:
                listener.say(f"{folder} is already finished.")
            else:
                finetune_checkpoint(
                    partial(_open_source, source, stage.recipe.patch, patched, folder, listener.say),
                    stage.recipe,
                    folder,
                    after(steps),
                    whole=whole,
                    length=stage.length,
                    position_span=stage.position_span,
                    unpackable=stage.unpackable,
                    scoring=scoring,
                )
            if first:
                clear_finished(folder)
        finally:
            # an adapter's base is the patched folder
            if first and (not (folder / RUN).exists() or (is_finished(folder) and stage.recipe.save != "adapter")):
                shutil.rmtree(patched, ignore_errors=True)
                with suppress(OSError):  # earlier stages are kept
                    patched.parent.rmdir()
        steps += stage.recipe.steps


def _open_source(
    source: Checkpoint, patch: Patch | None, patched: Path, folder: Path, say: Callable[[str], None], launch: Launch
) -> tuple[Checkpoint, dict[str, Any]]:
    """The checkpoint to train, which the main process writes if there is a patch, and where it came from.

    folder: of the stage.
    """
    origin = source.origin() if launch.is_main else {}  # only compared and written there
    if patch is None:
        return source, origin
    if launch.is_main:
        if not (folder / RUN).exists():  # what a run with another recipe may have left
            shutil.rmtree(patched, ignore_errors=True)
        if not patched.exists():  # if it exists, it is complete
            patch_to(_plan_patch(source, patch), patched, say=say)
    launch.wait()
    return open_checkpoint(patched, weights=True), origin
