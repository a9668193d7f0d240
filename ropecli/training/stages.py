"""Plans a recipe's stages from configs only: lengths, patches, and what can be packed.

Staged training follows YaRN, which trains s = 32 from s = 16 (arXiv:2309.00071, section 4.1), and EasyContext and
ProLong (arXiv:2410.02660), which raise base and length step by step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropecli.attention.patching import with_layout
from ropecli.checkpoint.advice import how_to_read
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import Positions, read_state
from ropecli.config.fields import section_of
from ropecli.config.saved_remapping import SavedRemapping
from ropecli.data.sampling import refuse_impossible_positions
from ropecli.data.stream import Stream, open_stream
from ropecli.errors import MethodError, RecipeError, RopecliError
from ropecli.evaluation.protocols import short_context
from ropecli.live.stock_transformers import read_stock_config, refuse_encoder, stock_config_of
from ropecli.names import LENGTH_ONLY, refuse_held_out
from ropecli.scaling.spec import make_spec
from ropecli.training.loss import prove_positions, small_loss
from ropecli.training.recipe_schema import Patch, Recipe


@dataclass(frozen=True)
class Stage:
    """One run of a recipe, with the lengths that follow from the checkpoint.

    number: from 1. plan: the stage's own patch, if any. in_effect: the patch that it trains with, its own or an earlier
    stage's; None for an unchanged checkpoint. positions: with that patch. remapping: of a distance method. length:
    tokens per sequence. position_span: tokens that positions with gaps may span.
    """

    number: int
    recipe: Recipe
    checkpoint: Checkpoint
    plan: PatchPlan | None
    in_effect: PatchPlan | None
    positions: Positions
    remapping: SavedRemapping | None
    length: int
    position_span: int

    @property
    def longest(self) -> int:
        """Tokens that the positions of a sequence span."""
        return self.length if self.recipe.positions == "full" else self.position_span

    @property
    def config(self) -> dict[str, Any]:
        """config.json as it is trained."""
        return self.in_effect.config if self.in_effect else self.checkpoint.config

    def sequences_per_step(self, processes: int = 1) -> int:
        groups = max(1, processes // self.recipe.context_parallel_size)
        return self.recipe.batch_size * self.recipe.gradient_accumulation * groups

    def open_data(self, tokenizer: Any) -> Stream:
        """Tokenize and lay out the training data. Raises the errors of open_stream."""
        return open_stream(self.recipe, tokenizer, self.length, self.position_span, why_unpackable=self._why_unpackable)

    def describe_data(self, stream: Stream) -> list[str]:
        """A sentence per source, and what the training reaches. The first may be a warning."""
        read = self.positions
        weighed = short_context(read.pretraining_length).tokens if self.recipe.loss == "longce" else None
        return stream.summary(read.pretraining_length, read.context_length, weighed)

    def _why_unpackable(self) -> str:
        """Why conversations cannot stand side by side in a sequence; empty if they can."""
        if self.recipe.positions != "full":
            return f"--positions {self.recipe.positions}"
        if self.remapping:
            return f"{self.remapping.method} does not support packed documents"
        if self.recipe.context_parallel_size > 1 and "flash" not in self.recipe.attn:
            return f"with attn: {self.recipe.attn}, shared sequences need a mask of tokens × tokens"
        try:
            self.prove_positions(packed=True)
        except RopecliError as error:
            return str(error)
        return ""

    def prove_positions(self, *, packed: bool) -> None:
        """Check on a small model that the model follows gaps, or boundaries of packed documents, in its positions."""
        config = stock_config_of(self.config, self.checkpoint.name)
        prove_positions(small_loss(config, self.recipe.attn), self.recipe.positions, packed)

    def warnings(self) -> Iterator[str]:
        """Yield what the user should know before it runs."""
        recipe, longest, context_length = self.recipe, self.longest, self.positions.context_length
        if self.plan:
            yield from (finding.message for finding in self.plan.findings)
        if longest > context_length:
            what = f"sequences of {longest} tokens" if recipe.positions == "full" else f"positions up to {longest}"
            more = how_to_read(read_state(self.checkpoint), longest)
            yield f"{what} exceed the checkpoint's context length, {context_length}. {more}".rstrip()
        if recipe.warmup_steps >= recipe.steps:
            warmup = f"warmup_steps is {recipe.warmup_steps} of {recipe.steps} steps"
            yield f"{warmup}: the peak learning rate is never reached."
        if section_of(self.checkpoint.config).get("router_aux_loss_coef"):
            yield "training uses only the next-token loss, without the routers' load-balancing loss."
        if self.remapping:
            last, keys = np.array([self.length - 1]), np.arange(self.length)
            if np.array_equal(self.remapping.remapping().distances(last, keys), last[:, None] - keys):
                method = self.remapping.method
                yield f"{method} has no effect on sequences of {self.length} tokens. Use a greater --length."


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
            plan = plan_patch(checkpoint, run.patch) if run.patch else None
            in_effect = plan or in_effect
            stages.append(_plan_stage(checkpoint, run, number, plan, in_effect))
        except RopecliError as error:
            raise error if len(runs) == 1 else type(error)(f"stage {number} of {len(runs)}: {error}") from error
    return stages


def plan_patch(checkpoint: Checkpoint, patch: Patch) -> PatchPlan:
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
    remapping = in_effect.remapping if in_effect else state.saved_remapping
    pretraining_length, context_length = positions.pretraining_length, positions.context_length
    position_span = recipe.window or context_length
    length = recipe.length or (context_length if recipe.positions == "full" else pretraining_length)
    refuse_impossible_positions(recipe.positions, length, position_span, recipe.pose_chunks)
    if recipe.loss == "longce" and length <= (first := short_context(pretraining_length).first):
        raise RecipeError(
            f"--length is {length}; loss: longce needs more than {first}, the pretraining length and a quarter."
        )
    if remapping and (recipe.positions != "full" or recipe.packs or recipe.attn != "auto"):
        raise RecipeError(
            f"{remapping.method} counts the tokens of a row with its own attention. Train it with --positions full, "
            "--sequences long, concat or single, and attn: auto."
        )
    stage = Stage(number, recipe, checkpoint, plan, in_effect, positions, remapping, length, position_span)
    if recipe.packs or recipe.positions != "full":
        stage.prove_positions(packed=recipe.packs)
    return stage


def describe(stages: list[Stage], processes: int = 1) -> list[str]:
    """One sentence per stage."""
    sentences = []
    for stage in stages:
        run, sequences = stage.recipe, stage.sequences_per_step(processes)
        tokens = sequences * stage.length
        gaps = "" if run.positions == "full" else f", {run.positions} positions up to {stage.position_span:,}"
        weights = sum(source.weight for source in run.sources)
        data = " + ".join(
            f"{source.data}{f' ({source.sequences})' if source.sequences else ''}"
            + (f" {source.weight / weights:.0%}" if run.mixture else "")
            for source in run.sources
        )
        sentences.append(
            f"{heading(stage, len(stages))}; sequences of {stage.length:,} tokens{gaps}, from {data}; {run.steps:,} "
            f"steps of {sequences:,} sequence{'s'[: sequences > 1]}: {tokens:,} tokens per step, "
            f"{run.steps * tokens:,} in total"
        )
    return sentences


def heading(stage: Stage, count: int) -> str:
    """The scaling of a stage. count: of all stages."""
    number = f"stage {stage.number} of {count}: " if count > 1 else ""
    spec, context_length = stage.positions.main.spec, f"{stage.positions.context_length:,} tokens"
    if stage.plan:
        return f"{number}{stage.plan.spec.label} to {context_length}"
    return f"{number}as it is: {'unscaled' if spec.method.name == 'none' else spec.label}, {context_length}"
