"""Fine-tuning from a checkpoint to a checkpoint: data, model and engine are made ready, trained, and written.

What runs on several processes runs in all of them; the first one alone speaks and writes.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.checkpoint.state import read_state
from ropecli.config.fields import section_of
from ropecli.config.saved_remapping import Carrier
from ropecli.data import sources
from ropecli.data.positions import refuse_impossible
from ropecli.data.stream import Stream, open_stream
from ropecli.errors import DataError
from ropecli.evaluation.scoring import refuse_unknown_ids
from ropecli.live.loading import load_model, load_tokenizer, settle
from ropecli.training import adapters
from ropecli.training.distributed import leave, make_accelerator, prepare, state_to_save
from ropecli.training.loop import Loop, Progress, stop_on_signals
from ropecli.training.loss import NextTokenLoss, enable_checkpointing, prove_positions
from ropecli.training.optimization import make_optimizer
from ropecli.training.output.finished_weights import clear_finished, finished_step, write_result
from ropecli.training.output.metrics_log import choose_tracker, open_trackers
from ropecli.training.output.run_settings import begin, own_folder, refuse_foreign
from ropecli.training.recipe import Recipe
from ropecli.training.refusals import carrier_in_effect, refuse_beside_method, refuse_unsuitable
from ropecli.training.validation import make_evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Say = Callable[[str], None]


def finetune_checkpoint(
    checkpoint: Checkpoint,
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    more: bool = False,
    say: Say = lambda message: None,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """One run of a recipe without stages, into the folder `output`, which stock transformers then loads.

    say: told in sentences what is used and left out. on_step: called after each step. Both on the main process alone.
    SIGTERM, SIGHUP and Ctrl-C save and stop: SystemExit 143 and 129, KeyboardInterrupt. One that comes in the last pass
    lets the run finish; more: another stage follows, and then it stops here. Raises CheckpointError, DataError,
    OutputError, RecipeError, DivergedError or NotFiniteError for a loss that leaves its best far behind, and
    RopecliError where memory does not suffice.
    """
    if any(source.data == sources.DEMO for source in recipe.sources):
        raise DataError("'demo' is the held-out text that eval-ppl measures on; train on 'demo-train'.")
    refuse_foreign(output, resume)
    choose_tracker(recipe.tracker)
    length, window = settle_lengths(recipe, checkpoint)
    refuse_beside_method(recipe, carrier_in_effect(checkpoint))
    accelerator = make_accelerator(recipe)
    if not accelerator.is_main_process:
        say, on_step = (lambda message: None), (lambda progress: None)
    tokenizer = load_tokenizer(checkpoint)
    stream = open_stream(recipe, tokenizer, length, window, first=accelerator.local_main_process_first)
    model = _load(checkpoint, recipe)
    refuse_unknown_ids(stream.largest_id, model)
    loss_of = _loss_of(model, recipe, stream)
    refuse_unsuitable(accelerator, model, recipe, length)
    reach = length if recipe.positions == "full" else window
    optimizer = make_optimizer(adapters.trainable(loss_of), recipe)
    evaluation = make_evaluation(recipe, checkpoint, tokenizer, reach, accelerator, say)
    warnings = _warnings(checkpoint, recipe, length, window)
    for sentence in [*stream.summary(), *_about(model, recipe), *(f"warning: {warning}" for warning in warnings)]:
        say(sentence)
    asked = {
        "source": checkpoint.origin(),
        "data": stream.fingerprint(),
        "length": length,
        "window": window,
        "processes": accelerator.num_processes,
        "recipe": recipe.model_dump(mode="json", exclude={"stages"}),
    }
    main = accelerator.is_main_process
    with own_folder(output) if main else nullcontext(), stop_on_signals(say) as interrupt:
        if main:
            begin(output, asked, resume)
        accelerator.wait_for_everyone()
        if (steps := finished_step(output)) is not None:
            say(f"{output} is done already, after {steps} steps.")
            if main:
                clear_finished(output)
            return
        torch.manual_seed(recipe.seed)
        wrapped, optimizer = prepare(accelerator, loss_of, optimizer)
        if recipe.adapter != "none":
            adapters.save_trained_alone(accelerator)
        with open_trackers(accelerator, recipe, output, asked, say) as trackers:
            loop = Loop(
                accelerator, wrapped, optimizer, recipe, stream, output, evaluation, trackers, interrupt, say, on_step
            )
            loop.train()
        state = state_to_save(accelerator, wrapped)
        if state is not None:
            write_result(checkpoint, model, recipe, output, asked, state)
        accelerator.wait_for_everyone()
        if more and interrupt.agreed(accelerator):
            leave(accelerator)
            interrupt.stop(f"Saved in {output}; the same command with --resume goes on with the next stage.")


def _load(checkpoint: Checkpoint, recipe: Recipe) -> "PreTrainedModel":
    """Weights that are trained in float32, mixed precision being autocast's affair; frozen ones as on its device."""
    dtype = "float32" if recipe.adapter == "none" else settle()[0]
    model = load_model(checkpoint, dtype=dtype, device="cpu", attn=recipe.attn, options=adapters.quantization(recipe))
    return adapters.attach(model, recipe)


def _loss_of(model: "PreTrainedModel", recipe: Recipe, stream: Stream) -> NextTokenLoss:
    loss_of = NextTokenLoss(model, offload=recipe.offload_activations)
    if stream.packed or recipe.positions != "full":
        prove_positions(loss_of, recipe.positions, stream.packed)
    model.train()
    if recipe.gradient_checkpointing:
        enable_checkpointing(model)
    return loss_of


def _about(model: "PreTrainedModel", recipe: Recipe) -> list[str]:
    if recipe.adapter == "none":
        return []
    return [
        f"{recipe.adapter} {adapters.summary(model)}.",
        *(f"warning: {one}" for one in adapters.warnings(model, recipe)),
    ]


def _warnings(checkpoint: Checkpoint, recipe: Recipe, length: int, window: int) -> list[str]:
    warnings = []
    if recipe.warmup_steps >= recipe.steps:
        warnings.append(f"{recipe.warmup_steps} warm-up steps of {recipe.steps}: the full rate is not reached.")
    warnings += beyond_window(recipe, length, window, read_state(checkpoint).context_length)
    warnings += within_plain(length, carrier_in_effect(checkpoint))
    if recipe.offload_activations and not torch.cuda.is_available():
        warnings.append("offload_activations changes nothing without a GPU.")
    if section_of(checkpoint.config).get("router_aux_loss_coef"):
        warnings.append("the routers' load-balancing loss is left out; only the next-token loss is trained on.")
    return warnings


def settle_lengths(recipe: Recipe, checkpoint: Checkpoint, plan: PatchPlan | None = None) -> tuple[int, int]:
    """(length of a sequence, window that its positions reach), tokens.

    The window is the extended one; a sequence fills it, or, where positions have gaps, the pretraining window.
    plan: the patch in effect when the run begins, where it is not on disk yet. Raises RecipeError for sequences
    longer than the window that their positions are to reach.
    """
    extended = plan.target_length if plan else read_state(checkpoint).context_length
    window = recipe.window or extended
    if recipe.positions == "full":
        return recipe.length or extended, window
    length = recipe.length or read_state(checkpoint).pretraining_length
    refuse_impossible(recipe.positions, length, window, recipe.pose_chunks)
    return length, window


def beyond_window(recipe: Recipe, length: int, window: int, extended: int) -> list[str]:
    """Sentences for sequences, or positions with gaps, that reach beyond the extended window; all in tokens."""
    if recipe.positions != "full" and window > extended:
        return [f"positions up to {window} exceed the checkpoint's window, {extended}: patch it for that first."]
    if length > extended:
        return [f"sequences of {length} tokens exceed the checkpoint's window, {extended}: patch it first."]
    return []


def within_plain(length: int, carrier: Carrier | None) -> list[str]:
    """A sentence for sequences so short, tokens, that the method changes nothing in them."""
    if carrier is None:
        return []
    last, keys = np.array([length - 1]), np.arange(length)
    if not np.array_equal(carrier.remapping().distances(last, keys), last[:, None] - keys):
        return []
    return [
        f"sequences of {length} tokens are too short for {carrier.method} to change anything: it is trained as plain "
        "attention. Give a greater length."
    ]
