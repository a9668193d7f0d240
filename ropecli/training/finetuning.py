"""Fine-tunes a checkpoint in one run: prepares data, model and engine, trains, and writes the result.

All processes of a launch run this code; only the main process prints and writes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ropecli.attention import load_model
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.state import read_state
from ropecli.config.fields import section_of
from ropecli.config.saved_remapping import SavedRemapping
from ropecli.data import sources
from ropecli.data.gapped_positions import refuse_impossible_positions
from ropecli.data.stream import Batch, Stream, open_stream
from ropecli.errors import DataError
from ropecli.evaluation.scoring import refuse_unknown_ids
from ropecli.live.loading import load_tokenizer, settle
from ropecli.training import adapters
from ropecli.training.distributed import data_ranks, make_accelerator, prepare, state_to_save
from ropecli.training.finished_weights import clear_finished, finished_step, write_result
from ropecli.training.loop import Divergence, Interrupt, TrainingLoop, TrainingProgress, stop_on_signals
from ropecli.training.loss import NextTokenLoss, enable_checkpointing, explain_out_of_memory, prove_positions
from ropecli.training.optimization import make_optimizer, rate_factor
from ropecli.training.recipe import Recipe
from ropecli.training.refusals import refuse_method_conflicts, refuse_unsuitable, saved_method
from ropecli.training.run_folder import (
    CHECKPOINTS,
    LOGS,
    Checkpoints,
    RunLog,
    begin_run,
    choose_tracker,
    from_main,
    lock_output,
    losses_until,
    refuse_foreign,
)
from ropecli.training.validation import Validation, make_validation

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

Say = Callable[[str], None]


def finetune_checkpoint(
    checkpoint: Checkpoint,
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    say: Say = lambda message: None,
    on_step: Callable[[TrainingProgress], None] = lambda progress: None,
) -> None:
    """One run of a recipe without stages, into the folder `output`, which stock transformers then loads.

    say: told in sentences what is used and left out. on_step: called after each step. Both on the main process alone.
    SIGTERM, SIGHUP and Ctrl-C save and stop: SystemExit 143 and 129, KeyboardInterrupt. Raises CheckpointError,
    DataError, OutputError, RecipeError, DivergedError or NotFiniteError for a loss that leaves its best far behind, and
    RopecliError where memory does not suffice.
    """
    if any(source.data == sources.DEMO for source in recipe.sources):
        raise DataError("'demo' is the held-out text that eval-ppl measures on; train on 'demo-train'.")
    refuse_foreign(output, resume)
    tracker = choose_tracker(recipe.tracker)
    length, reach = settle_lengths(recipe, checkpoint)
    refuse_method_conflicts(recipe, saved_method(checkpoint))
    accelerator = make_accelerator(recipe, log_with=tracker, project_dir=str(output / LOGS))
    if not accelerator.is_main_process:
        say, on_step = (lambda message: None), (lambda progress: None)
    tokenizer = load_tokenizer(checkpoint)
    stream = open_stream(recipe, tokenizer, length, reach, first=accelerator.local_main_process_first)
    model = _load(checkpoint, recipe)
    refuse_unknown_ids(stream.largest_id, model)
    loss_of = _make_loss(model, recipe, stream)
    refuse_unsuitable(accelerator, model, recipe, length)
    optimizer = make_optimizer(adapters.trainable(loss_of), recipe)
    validation = make_validation(
        recipe, checkpoint, tokenizer, length if recipe.positions == "full" else reach, accelerator, say
    )
    warnings = _warnings(checkpoint, recipe, length, reach)
    for sentence in [
        *stream.summary(),
        *_adapter_summary(model, recipe),
        *(f"warning: {warning}" for warning in warnings),
    ]:
        say(sentence)
    settings = {
        "source": checkpoint.origin(),
        "data": stream.fingerprint(),
        "length": length,
        "window": reach,
        "processes": accelerator.num_processes,
        "recipe": recipe.model_dump(mode="json", exclude={"stages"}),
    }
    main = accelerator.is_main_process
    with lock_output(output) if main else nullcontext(), stop_on_signals(say) as interrupt:
        if main:
            begin_run(output, settings, resume)
        accelerator.wait_for_everyone()
        if (steps := finished_step(output)) is not None:
            say(f"{output} is done already, after {steps} steps.")
            if main:
                clear_finished(output)
            return
        run = _Run(accelerator, recipe, stream, validation, output, settings, interrupt, say, on_step)
        state = state_to_save(accelerator, run.train(loss_of, optimizer))
        if state is not None:
            write_result(checkpoint, model, recipe, output, settings, state)
        accelerator.wait_for_everyone()


@dataclass
class _Run:
    """What is done around the training loop: the log, validation, and the end of a run that diverges."""

    accelerator: "Accelerator"
    recipe: Recipe
    stream: Stream
    validation: Validation | None
    output: Path
    settings: dict[str, Any]
    interrupt: Interrupt
    say: Say
    on_step: Callable[[TrainingProgress], None]

    def train(self, loss_of: NextTokenLoss, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
        """Trains from the newest checkpoint, or from the start; returns what Accelerate made of the loss."""
        recipe = self.recipe
        self.wrapped, optimizer = prepare(self.accelerator, loss_of, optimizer)
        if recipe.adapter != "none":
            adapters.save_only_trained(self.accelerator)
        checkpoints = Checkpoints(
            self.accelerator, self.output / CHECKPOINTS, recipe.save_every, recipe.keep_checkpoints
        )
        loop = TrainingLoop(
            self.accelerator,
            self.wrapped,
            list(self.wrapped.parameters()),
            optimizer,
            schedule=lambda step: rate_factor(step, recipe),
            batches=self._batches,
            ended=lambda done: done >= recipe.steps,
            max_grad_norm=recipe.max_grad_norm,
            seed=recipe.seed,
            on_step=self._report,
            checkpoints=checkpoints,
            interrupt=self.interrupt,
            advice=self._advice,
        )
        done = checkpoints.restore(self.say)
        if done:
            self.say(f"Resuming after step {done}.")
        earlier = from_main(self.accelerator, lambda: losses_until(self.output, done))
        self.divergence = Divergence.from_losses(earlier, recipe.max_loss_rise, self.output)
        checkpoints.spare = self.divergence.last_good
        self.log = RunLog(self.accelerator, self.output, done or None, self.settings)
        if not done:
            self._validate(0)
        with closing(self.log), self._explain_out_of_memory():
            loop.train(done)
        return self.wrapped

    def _batches(self, step: int) -> list[Batch]:
        """This process's sequences of each pass: processes side by side, passes one after the other."""
        rank, ranks = data_ranks(self.accelerator)
        passes, size = self.recipe.gradient_accumulation, self.recipe.batch_size
        starts = [((step * passes + part) * ranks + rank) * size for part in range(passes)]
        return [self.stream.batch(range(start, start + size)) for start in starts]

    def _report(self, progress: TrainingProgress) -> None:
        self.log.write(asdict(progress))
        self.on_step(progress)
        self.divergence.add(progress.step, progress.loss)
        self._validate(progress.step)

    def _validate(self, step: int) -> None:
        """Perplexity on held-out text, where it is due; before the first step too."""
        if self.validation and self.validation.due(step):
            self.log.write(self.validation.run(self.accelerator, self.wrapped, step))

    def _advice(self) -> str:
        return (
            f"{self.divergence.kept()} Start over with a lower learning_rate or more warmup_steps, into another "
            "--output."
        )

    def _explain_out_of_memory(self) -> AbstractContextManager[None]:
        return explain_out_of_memory(
            f"A pass over {self.recipe.batch_size} × {self.stream.length} tokens",
            "Start over with a smaller batch_size, an adapter or shorter sequences, into another --output; `ropecli "
            "plan` says what fits.",
        )


def _load(checkpoint: Checkpoint, recipe: Recipe) -> "PreTrainedModel":
    """Weights that are trained in float32, mixed precision being autocast's affair; frozen ones as on its device."""
    dtype = "float32" if recipe.adapter == "none" else settle()[0]
    model = load_model(checkpoint, dtype=dtype, device="cpu", attn=recipe.attn, options=adapters.quantization(recipe))
    return adapters.attach(model, recipe)


def _make_loss(model: "PreTrainedModel", recipe: Recipe, stream: Stream) -> NextTokenLoss:
    loss_of = NextTokenLoss(model, offload=recipe.offload_activations)
    if stream.packed or recipe.positions != "full":
        prove_positions(loss_of, recipe.positions, stream.packed)
    model.train()
    if recipe.gradient_checkpointing:
        enable_checkpointing(model)
    return loss_of


def _adapter_summary(model: "PreTrainedModel", recipe: Recipe) -> list[str]:
    if recipe.adapter == "none":
        return []
    return [f"{recipe.adapter} {adapters.summary(model)}."]


def _warnings(checkpoint: Checkpoint, recipe: Recipe, length: int, reach: int) -> list[str]:
    warnings = []
    if recipe.warmup_steps >= recipe.steps:
        warnings.append(f"{recipe.warmup_steps} warm-up steps of {recipe.steps}: the full rate is not reached.")
    warnings += beyond_context_length(recipe, length, reach, read_state(checkpoint).context_length)
    warnings += too_short_for_method(length, saved_method(checkpoint))
    if recipe.offload_activations and not torch.cuda.is_available():
        warnings.append("offload_activations changes nothing without a GPU.")
    if section_of(checkpoint.config).get("router_aux_loss_coef"):
        warnings.append("the routers' load-balancing loss is left out; only the next-token loss is trained on.")
    return warnings


def settle_lengths(recipe: Recipe, checkpoint: Checkpoint, plan: PatchPlan | None = None) -> tuple[int, int]:
    """(length of a sequence, how far its positions may reach), tokens.

    The positions reach the context length unless the recipe's `window` says otherwise. A sequence has as many tokens,
    or, where positions have gaps, those of the pretraining length. plan: the patch in effect when the run begins,
    where it is not on disk yet. Raises RecipeError for sequences longer than their positions may reach.
    """
    state = read_state(checkpoint)
    context_length = plan.target_length if plan else state.context_length
    reach = recipe.window or context_length
    if recipe.positions == "full":
        return recipe.length or context_length, reach
    length = recipe.length or state.pretraining_length
    refuse_impossible_positions(recipe.positions, length, reach, recipe.pose_chunks)
    return length, reach


def beyond_context_length(recipe: Recipe, length: int, reach: int, context_length: int) -> list[str]:
    """Warnings of sequences, or of positions with gaps, that exceed the context length. All in tokens."""
    if recipe.positions != "full" and reach > context_length:
        exceeded = f"positions up to {reach} exceed the checkpoint's context length, {context_length}"
        return [f"{exceeded}: patch it for that first."]
    if length > context_length:
        return [
            f"sequences of {length} tokens exceed the checkpoint's context length, {context_length}: patch it first."
        ]
    return []


def too_short_for_method(length: int, method: SavedRemapping | None) -> list[str]:
    """A warning of sequences so short, in tokens, that the relative-position method changes nothing in them."""
    if method is None:
        return []
    last, keys = np.array([length - 1]), np.arange(length)
    if not np.array_equal(method.remapping().distances(last, keys), last[:, None] - keys):
        return []
    return [
        f"sequences of {length} tokens are too short for {method.method} to change anything: it is trained as plain "
        "attention. Give a greater length."
    ]
