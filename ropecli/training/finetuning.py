"""Fine-tunes a checkpoint: prepares data, model and engine, trains, and writes the result.

All processes run this code; only the main process prints and writes.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ropecli.attention import load_model
from ropecli.attention.loaded import check_tables
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.config.changes import get_path
from ropecli.data.stream import Batch, Stream, open_stream
from ropecli.errors import ProofError, RecipeError
from ropecli.evaluation.protocols import short_context
from ropecli.evaluation.readers.live import refuse_unknown_ids
from ropecli.live.devices import emulates_bfloat16
from ropecli.live.loading import load_tokenizer
from ropecli.training import adapters, run_folder
from ropecli.training.finished_weights import write_result
from ropecli.training.launch import Launch, start_launch
from ropecli.training.loop import Interrupt, TrainingLoop, TrainingProgress, stop_on_signals
from ropecli.training.loss import (
    LongContextLoss,
    NextTokenLoss,
    enable_checkpointing,
    explain_out_of_memory,
    prove_positions,
)
from ropecli.training.memory_plan.setups import resolve_checkpointing
from ropecli.training.recipe_schema import Recipe
from ropecli.training.refusals import refuse_unsuitable, weighed_from
from ropecli.training.sharded_weights import UnreadModel, build_unread
from ropecli.training.validation import TIMED_STEPS, Scoring, make_validation

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Listener(NamedTuple):
    """What a run calls, on its main process only.

    say: with messages about the data and the model. on_step: after each step. on_phase: with the name of each phase.
    """

    say: Callable[[str], None] = lambda message: None
    on_step: Callable[[TrainingProgress], None] = lambda progress: None
    on_phase: Callable[[str], None] = lambda phase: None


SILENT = Listener()


def finetune_checkpoint(
    open_source: Callable[[Launch], tuple[Checkpoint, dict[str, Any]]],
    recipe: Recipe,
    output: Path,
    listener: Listener,
    *,
    whole: dict[str, Any],
    length: int,
    position_span: int,
    unpackable: str,
    scoring: Scoring | None = None,
) -> None:
    """Train one stage, planned by plan_stages, into the folder `output`, or resume what it contains.

    open_source: opens the checkpoint to train, with its origin. whole: the recipe with all stages, to record. length:
    tokens per sequence. position_span: tokens that positions with gaps may span. unpackable: see Stage. scoring:
    instead of the recipe's eval_data. SIGTERM, SIGHUP and Ctrl-C save and stop, with SystemExit 143 or 129, or
    KeyboardInterrupt. Raises RopecliError.
    """
    say, given = listener.say, recipe
    if recipe.mixed_precision == "bf16" and not torch.cuda.is_available() and emulates_bfloat16():
        say("This CPU has no bfloat16 arithmetic: training in float32, as with mixed_precision none.")
        recipe = recipe.model_copy(update={"mixed_precision": "none"})
    launch = start_launch(
        recipe, log_with=run_folder.choose_tracker(recipe.tracker), project_dir=str(output / run_folder.LOGS)
    )
    checkpoint, origin = open_source(launch)
    main = launch.is_main
    sequences = launch.data_ranks * recipe.batch_size * recipe.gradient_accumulation
    processes = f"{launch.world} process{'es'[: 2 * (launch.world > 1)]}"
    say(f"Training with {processes}: {sequences} sequence{'s'[: sequences > 1]} of {length:,} tokens per step.")
    tokenizer = load_tokenizer(checkpoint)
    listener.on_phase("tokenizing")

    def open_data(unpackable: str) -> Stream:
        first = launch.local_main_first
        held_out = scoring.held_out if scoring else ()
        return open_stream(
            recipe, tokenizer, length, position_span, unpackable=unpackable, held_out=held_out, first=first
        )

    stream = open_data(unpackable)
    listener.on_phase("loading")
    model, unread = _load(checkpoint, recipe, launch)
    launch.wait()  # hosts tokenize and load at their own speed
    refuse_unknown_ids(stream.largest_id, model)
    recorded = launch.from_main(lambda: get_path(run_folder.read_run(output), "resolved.gradient_checkpointing"))
    recipe = resolve_checkpointing(launch, model.config, recipe, length, recorded, say)
    positions = read_state(checkpoint).positions
    try:
        loss_of = _make_loss(model, recipe, stream.packed, unread, positions.pretraining_length)
    except RecipeError as error:
        if not stream.chose_packing:
            raise
        stream = open_data(str(error))
        loss_of = _make_loss(model, recipe, stream.packed, unread, positions.pretraining_length)
    refuse_unsuitable(launch, model, recipe, length)
    optimizer = make_optimizer(adapters.trainable(loss_of), recipe)
    longest = length if recipe.positions == "full" else position_span
    scoring = scoring or make_validation(recipe, checkpoint, tokenizer, longest, launch, say)
    weighed = weighed_from(recipe, positions.pretraining_length)
    for sentence in stream.summary(positions.pretraining_length, positions.context_length, weighed):
        say(sentence)
    if recipe.adapter != "none":
        trained, total = model.num_parameters(only_trainable=True), model.num_parameters()
        say(f"{recipe.adapter} trains {trained:,} of {total:,} parameters ({trained / total:.2%}).")
    settings = {
        "source": origin,
        "recipe": given.record(),
        "data": stream.fingerprint(),
        "length": length,
        "window": position_span,
        "processes": launch.world,
        "resolved": recipe.model_dump(mode="json", include={"mixed_precision", "gradient_checkpointing"}),
    }
    with stop_on_signals(say) as interrupt:
        if main:
            run_folder.begin_run(output, {**settings, "recipe": whole})
        launch.wait()
        listener.on_phase("fine-tuning")
        wrapped, optimizer = _prepare(checkpoint, launch, loss_of, optimizer, unread)
        _train(
            *(launch, recipe, stream, scoring, output, listener),
            wrapped=wrapped,
            optimizer=optimizer,
            interrupt=interrupt,
            settings=settings,
        )
        if unread and unread.files and recipe.adapter == "none":
            tensors = unread.gathered()
            try:
                if main:
                    write_result(checkpoint, model, output, settings, gathered=tensors)
            finally:
                deque(tensors, maxlen=0)  # all processes gather every tensor, even if writing fails
        else:
            state = launch.state_to_save(wrapped, only_trained=recipe.adapter != "none")
            if state is not None:
                write_result(checkpoint, model, output, settings, save=recipe.save, state=state)
        launch.wait()


def _prepare(
    checkpoint: Checkpoint, launch: Launch, loss_of: NextTokenLoss, optimizer: Any, unread: UnreadModel | None
) -> tuple[torch.nn.Module, Any]:
    """The loss module and the optimizer as the engine wraps them, with the weights read and their tables checked."""
    wrapped, optimizer = launch.prepare(loss_of, optimizer)
    if unread:
        unread.read(launch)
    if differences := check_tables(wrapped, checkpoint).differences:  # of what the engine made of it
        raise ProofError(" ".join(differences))
    if hasattr(loss_of.model, "peft_config"):
        adapters.save_only_trained(launch.accelerator)
    return wrapped, optimizer


def _train(
    launch: Launch,
    recipe: Recipe,
    stream: Stream,
    scoring: Scoring | None,
    output: Path,
    listener: Listener,
    *,
    wrapped: torch.nn.Module,
    optimizer: Any,
    interrupt: Interrupt,
    settings: dict[str, Any],
) -> None:
    """Train from the newest checkpoint, or from the start, with the log and validation."""
    checkpoints = run_folder.TrainingCheckpoints(
        launch, output / run_folder.CHECKPOINTS, recipe.save_every, recipe.keep_checkpoints, say=listener.say
    )
    if scoring:
        checkpoints.best = lambda: scoring.best
    done = checkpoints.restore()
    if done:
        listener.say(f"Resuming after step {done}.")
    log = run_folder.RunLog(launch, output, done or None, settings)

    def fix(steps: int) -> None:
        """Set the number of steps, where the time decides."""
        nonlocal recipe
        recipe = recipe.model_copy(update={"steps": steps})
        settings["recipe"]["steps"] = steps

    if scoring:
        for line in launch.from_main(lambda: run_folder.metrics_until(output, done) if done else []):
            scoring.follow(line)
        if scoring.steps:
            fix(scoring.steps)

    def validate(step: int) -> None:
        if scoring and scoring.due(step):
            measured = scoring.run(launch, wrapped, step)
            log.write(measured)
            scoring.follow(measured)
            listener.say(f"Step {step}: {scoring.words(measured)}.")

    def report(progress: TrainingProgress) -> None:
        log.write(asdict(progress))
        if scoring and scoring.steps is None and progress.step >= TIMED_STEPS:
            scoring.steps = launch.from_main(lambda: scoring.affordable(progress.tokens / progress.tokens_per_second))
            fix(scoring.steps)
        listener.on_step(progress)
        validate(progress.step)

    def batches(step: int) -> list[Batch]:
        """This process's batches of a step, one per pass. Sequences are numbered by step, pass, process and row."""
        passes, size = recipe.gradient_accumulation, recipe.batch_size
        starts = [((step * passes + part) * launch.data_ranks + launch.data_rank) * size for part in range(passes)]
        return [stream.batch(range(start, start + size)) for start in starts]

    loop = TrainingLoop(
        launch,
        wrapped,
        list(wrapped.parameters()),
        optimizer,
        schedule=lambda step: [recipe.learning_rate * rate_factor(step, recipe)] * len(optimizer.param_groups),
        batches=batches,
        ended=lambda done: done >= recipe.steps or (scoring is not None and scoring.ended),
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
        on_step=report,
        checkpoints=checkpoints,
        interrupt=interrupt,
        advice=(
            f"Checkpoints from before that stay in {checkpoints.folder}. Start over in another --output with a lower "
            "--learning-rate or more warmup_steps."
        ),
    )
    pass_size = f"A pass over {recipe.batch_size} × {stream.length} tokens"
    remedy = (
        "Start over in another --output with a smaller --batch-size, an --adapter or a shorter --length. "
        "`ropecli plan` shows what fits."
    )
    with closing(log), explain_out_of_memory(pass_size, remedy):
        if not done:
            validate(0)
        loop.train(done)
        if scoring and scoring.best is not None:
            listener.say(f"Keeping step {checkpoints.restore(scoring.best)}, the best.")


def _load(checkpoint: Checkpoint, recipe: Recipe, launch: Launch) -> tuple["PreTrainedModel", UnreadModel | None]:
    """Load the model: trained weights in float32, as autocast expects; frozen ones on a GPU in bfloat16.

    Under FSDP2 its weights are read only after sharding, and it is also returned as an UnreadModel.
    """
    device = launch.accelerator.device
    dtype = "float32" if recipe.adapter == "none" or device.type == "cpu" else "bfloat16"
    quantized = adapters.quantization(recipe, device)
    if launch.shards and not (quantized or "quantization_config" in checkpoint.config):
        unread = build_unread(checkpoint, dtype=dtype, attn=recipe.attn)
        return adapters.attach(unread.model, recipe), unread
    model = load_model(checkpoint, dtype=dtype, device="cpu", attn=recipe.attn, options=quantized)
    return adapters.attach(model, recipe), None


def _make_loss(
    model: "PreTrainedModel", recipe: Recipe, packed: bool, unread: UnreadModel | None, pretraining_length: int
) -> NextTokenLoss:
    """Create the loss and check that it suits the model, on a small model of the architecture for an unread one."""
    small = NextTokenLoss(unread.small()) if unread else None
    options: dict[str, Any] = {"offload": recipe.offload_activations, "like": small}
    loss_of = NextTokenLoss(model, **options)
    if recipe.loss == "longce":
        loss_of = LongContextLoss(model, short_context(pretraining_length), recipe.longce_cap, **options)
    if packed or recipe.positions != "full":
        prove_positions(small or loss_of, recipe.positions, packed)
    model.train()
    if recipe.gradient_checkpointing:
        enable_checkpointing(model)
    return loss_of


def make_optimizer(
    parameters_by_name: Iterable[tuple[str, torch.nn.Parameter]], recipe: Recipe
) -> torch.optim.Optimizer:
    """Create AdamW (arXiv:1711.05101) for the trained parameters; weight decay applies only to matrices.

    adamw-8bit: bitsandbytes keeps the state in 8 bits (Dettmers et al. 2022, arXiv:2110.02861); tensors with fewer than
    4,096 values stay in float32. Raises RecipeError if bitsandbytes is not installed.
    """
    parameters = [parameter for _, parameter in parameters_by_name if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    rates: dict[str, Any] = {"lr": recipe.learning_rate, "betas": recipe.betas}
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, **rates, fused=True)  # fused makes no temporary copies
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise RecipeError("optimizer: adamw-8bit needs bitsandbytes. Run `pip install bitsandbytes`.") from error
    return AdamW8bit(groups, **rates)


def rate_factor(step: int, recipe: Recipe) -> float:
    """Factor of the learning rate at step 0, 1, ...: linear warm-up, then 1, a cosine down to 0.1, or a line to 0."""
    warm = min(1.0, (step + 1) / (recipe.warmup_steps + 1))
    if recipe.schedule == "constant":
        return warm
    if recipe.schedule == "linear":  # zero after the last step
        return min(warm, (recipe.steps - step) / max(1, recipe.steps - recipe.warmup_steps))
    past = max(0.0, step - recipe.warmup_steps) / max(1, recipe.steps - 1 - recipe.warmup_steps)
    return warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, past))))
