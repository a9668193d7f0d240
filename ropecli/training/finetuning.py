"""Runs the stages of a recipe in order. Each trains the previous stage's result, patched if it says so.

OUTPUT/stages/N-patched/   input of stage N: hard links and its own config.json; removed after the stage
OUTPUT/stages/N/           stage N, a run like any other (run_folder.py), kept as a checkpoint
OUTPUT/                    the last stage

All processes run this code; only the main process prints and writes.
"""

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ropecli.atomic import sole_use
from ropecli.attention import load_model
from ropecli.attention.loaded import check_tables
from ropecli.attention.patching import patch_to
from ropecli.checkpoint.files import RUN, STAGES
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.data.stream import Batch, Stream
from ropecli.errors import NotFiniteError, ProofError
from ropecli.evaluation.protocols import short_context
from ropecli.evaluation.readers.live import refuse_unknown_ids
from ropecli.live.devices import emulates_bfloat16
from ropecli.live.lm_head import SplitModel
from ropecli.live.loading import load_tokenizer
from ropecli.live.stock_transformers import stock_config_of
from ropecli.ranks import read_ranks
from ropecli.training import adapters, run_folder
from ropecli.training.finished_weights import is_finished, write_result
from ropecli.training.interrupt import Interrupt, stop_on_signals
from ropecli.training.launch import Launch, leave_processes, refuse_unsuitable, start_launch
from ropecli.training.loop import TrainingProgress, make_optimizer, rate_factor, train_steps
from ropecli.training.loss import (
    LongContextLoss,
    NextTokenLoss,
    enable_checkpointing,
    explain_out_of_memory,
    small_loss,
)
from ropecli.training.memory_plan.setups import agree_on_checkpointing
from ropecli.training.recipe_schema import Patch, Recipe
from ropecli.training.sharded_weights import UnreadModel, all_finite, build_unread, gather_state
from ropecli.training.stages import Stage, heading, plan_patch
from ropecli.training.validation import TIMED_STEPS, Scoring, make_validation

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Listener(NamedTuple):
    """What a run calls, on its main process only.

    say: with messages about the data and the model. on_step: after each step, counted over all stages. on_phase: with
    the name of each phase.
    """

    say: Callable[[str], None] = lambda message: None
    on_step: Callable[[TrainingProgress], None] = lambda progress: None
    on_phase: Callable[[str], None] = lambda phase: None


SILENT = Listener()
_SAVE_AFTER = 20 * 60
"""Seconds without a training checkpoint, of long steps."""
_START_OVER = "Start over in another --output with a"


def run_stages(
    stages: Sequence[Stage],
    output: Path,
    *,
    resume: bool = False,
    listener: Listener = SILENT,
    scoring: Scoring | None = None,
    stream: Stream | None = None,
) -> None:
    """Run the stages of plan_stages into the folder `output`, which stock transformers can then load.

    scoring: instead of the recipe's eval_data. stream: the training data, if they are open already. With several
    processes `output` must be on a disk that they share. SIGTERM, SIGHUP and Ctrl-C save and stop, with SystemExit 143
    or 129, or KeyboardInterrupt. Raises RopecliError.
    """
    checkpoint = stages[0].checkpoint
    folders = [output / STAGES / str(stage.number) for stage in stages[:-1]] + [output]
    first = read_ranks().rank == 0
    listener = listener if first else SILENT
    if first:
        run_folder.refuse_foreign(output, resume)
        for stage, folder in zip(stages, folders, strict=True):
            # the source of an unfinished one is compared when it begins
            origin = {"source": checkpoint.origin()} if stage.number == 1 and is_finished(folder) else {}
            run_folder.refuse_other_run(folder, {**origin, "recipe": stage.recipe.record()})
    for stage in stages:
        for warning in stage.warnings():
            listener.say(f"warning: {f'stage {stage.number}: ' if len(stages) > 1 else ''}{warning}")
    with sole_use(output / run_folder.LOCK, output) if first else nullcontext():
        source, done = checkpoint, 0
        for stage, folder in zip(stages, folders, strict=True):
            if len(stages) > 1 or stage.plan:
                listener.say(heading(stage, len(stages)))
            patched = output / STAGES / f"{stage.number}-patched"
            try:
                if is_finished(folder):
                    listener.say(f"{folder} is already finished.")
                else:
                    if stage.number > 1:
                        source = open_checkpoint(folders[stage.number - 2], weights=True)
                    counted = _counted_from(done, listener)
                    _run_stage(_prepare(stage, source, patched, folder, counted, scoring, stream))
            finally:
                if first:
                    _clear(stage, folder, patched)
            done += stage.recipe.steps


def _counted_from(done: int, listener: Listener) -> Listener:
    return listener._replace(on_step=lambda progress: listener.on_step(replace(progress, step=done + progress.step)))


def _clear(stage: Stage, folder: Path, patched: Path) -> None:
    """Remove what a finished stage, or one that never began, no longer needs."""
    finished = is_finished(folder)
    if finished:
        shutil.rmtree(folder / run_folder.CHECKPOINTS, ignore_errors=True)
    # an adapter's base is the patched folder
    if not (folder / RUN).exists() or (finished and stage.recipe.save != "adapter"):
        shutil.rmtree(patched, ignore_errors=True)
        with suppress(OSError):  # earlier stages are kept
            patched.parent.rmdir()


@dataclass
class _Run:
    """A stage, prepared. recipe: with what was left to this machine. settings: recorded with the run.

    module: the loss, which the engine wraps. unread: the model, if its weights are read after that. saved: when a
    training checkpoint was last saved, by time.monotonic.
    """

    recipe: Recipe
    launch: Launch
    checkpoint: Checkpoint
    output: Path
    listener: Listener
    stream: Stream
    scoring: Scoring | None
    model: "PreTrainedModel"
    unread: UnreadModel | None
    module: torch.nn.Module
    optimizer: Any
    settings: dict[str, Any]
    saved: float = field(default_factory=time.monotonic)

    def wrap(self) -> None:
        """Let the engine wrap the loss, read the weights if they are not, and check the rotary tables."""
        self.module, self.optimizer = self.launch.prepare(self.module, self.optimizer)
        if self.unread:
            self.unread.read(self.launch)
        if differences := check_tables(self.module, self.checkpoint).differences:  # of what the engine made of it
            raise ProofError(" ".join(differences))
        if self.recipe.adapter != "none":
            adapters.save_only_trained(self.launch.accelerator)

    def set_steps(self, steps: int) -> None:
        """Set the number of steps, where the time decides."""
        self.recipe = self.recipe.model_copy(update={"steps": steps})
        self.settings["recipe"]["steps"] = steps

    def rate(self, step: int) -> float:
        return self.recipe.learning_rate * rate_factor(step, self.recipe)

    def batches(self, step: int) -> list[Batch]:
        """This process's batches of a step, one per pass. Sequences are numbered by step, pass, process and row."""
        passes, size, launch = self.recipe.gradient_accumulation, self.recipe.batch_size, self.launch
        starts = [((step * passes + part) * launch.data_ranks + launch.data_rank) * size for part in range(passes)]
        return [self.stream.batch(range(start, start + size)) for start in starts]

    def ended(self, done: int) -> bool:
        return done >= self.recipe.steps or (self.scoring is not None and self.scoring.ended)


def for_this_device(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """Return the recipe in float32 if this is a CPU that only emulates bfloat16, which takes longer."""
    if recipe.mixed_precision == "bf16" and not torch.cuda.is_available() and emulates_bfloat16():
        say("This CPU has no bfloat16 arithmetic: training in float32, as with mixed_precision none.")
        return recipe.model_copy(update={"mixed_precision": "none"})
    return recipe


def _prepare(
    stage: Stage,
    source: Checkpoint,
    patched: Path,
    output: Path,
    listener: Listener,
    scoring: Scoring | None,
    stream: Stream | None,
) -> _Run:
    """Start the engine, open data and model, and refuse what cannot be trained."""
    say = listener.say
    recipe = for_this_device(stage.recipe, say)
    launch = start_launch(
        recipe, log_with=run_folder.choose_tracker(recipe.tracker), project_dir=str(output / run_folder.LOGS)
    )
    origin = source.origin() if launch.is_main else {}  # only compared and written there
    checkpoint = _patch(launch, source, recipe.patch, patched, output) if recipe.patch else source
    sequences, processes = stage.sequences_per_step(launch.world), "process" if launch.world == 1 else "processes"
    say(
        f"Training with {launch.world} {processes}: {sequences} sequence{'s'[: sequences > 1]} of {stage.length:,} "
        "tokens per step."
    )
    tokenizer = load_tokenizer(checkpoint)
    listener.on_phase("tokenizing")
    stream = stream or stage.open_data(tokenizer)
    listener.on_phase("loading")
    model, unread = _load(checkpoint, recipe, launch)
    launch.wait()  # hosts tokenize and load at their own speed
    refuse_unknown_ids(stream.largest_id, model)
    config = stock_config_of(stage.config, checkpoint.name)
    recipe = agree_on_checkpointing(launch, config, recipe, stage.length, say)
    refuse_unsuitable(launch, model, recipe, stage.length)
    loss_of = _make_loss(model, recipe, unread, stage)
    scoring = scoring or make_validation(recipe, checkpoint, tokenizer, stage.longest, launch, say)
    for sentence in stage.describe_data(stream):
        say(sentence)
    if recipe.adapter != "none":
        trained, total = model.num_parameters(only_trainable=True), model.num_parameters()
        say(f"{recipe.adapter} trains {trained:,} of {total:,} parameters ({trained / total:.2%}).")
    settings = {
        "source": origin,
        "recipe": stage.recipe.record(),
        "data": stream.fingerprint(),
        "length": stage.length,
        "window": stage.position_span,
        "processes": launch.world,
        "resolved": recipe.model_dump(mode="json", include={"mixed_precision", "gradient_checkpointing"}),
    }
    modules = (model, unread, loss_of, make_optimizer(loss_of, recipe))
    return _Run(recipe, launch, checkpoint, output, listener, stream, scoring, *modules, settings)


def _run_stage(run: _Run) -> None:
    """Train and write a prepared stage, or resume what its output folder contains."""
    with stop_on_signals(run.listener.say) as interrupt:
        if run.launch.is_main:
            run_folder.begin_run(run.output, run.settings)
        run.launch.wait()
        run.listener.on_phase("fine-tuning")
        run.wrap()
        _train(run, interrupt)
        _write(run)


def _patch(launch: Launch, source: Checkpoint, patch: Patch, patched: Path, output: Path) -> Checkpoint:
    """The patched checkpoint, which the main process writes unless it is there."""
    if launch.is_main:
        if not (output / RUN).exists():  # what a run with another recipe may have left
            shutil.rmtree(patched, ignore_errors=True)
        if not patched.exists():  # if it exists, it is complete
            patch_to(plan_patch(source, patch), patched)
    launch.wait()
    return open_checkpoint(patched, weights=True)


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


def _make_loss(model: "PreTrainedModel", recipe: Recipe, unread: UnreadModel | None, stage: Stage) -> NextTokenLoss:
    """Create the loss in training mode. A small model tells what the head of an unread one does."""
    like = small_loss(model.config, recipe.attn).split if unread else None
    options: dict[str, Any] = {"offload": recipe.offload_activations, "split": SplitModel(model, like=like)}
    loss_of = NextTokenLoss(model, **options)
    if recipe.loss == "longce":
        short = short_context(stage.positions.pretraining_length)
        loss_of = LongContextLoss(model, short, recipe.longce_cap, **options)
    model.train()
    if recipe.gradient_checkpointing:
        enable_checkpointing(model)
    return loss_of


def _train(run: _Run, interrupt: Interrupt) -> None:
    """Train from the newest checkpoint, or from the start, with the log and validation."""
    launch, recipe, scoring, say = run.launch, run.recipe, run.scoring, run.listener.say
    checkpoints = run_folder.TrainingCheckpoints(launch, run.output / run_folder.CHECKPOINTS, recipe.keep_checkpoints)
    if done := checkpoints.restore():
        say(f"Resuming after step {done}.")
    log = run_folder.RunLog(launch, run.output, done, run.settings)
    if scoring:
        for line in launch.from_main(lambda: run_folder.metrics_until(run.output, done)):
            scoring.follow(line)
        if scoring.steps:
            run.set_steps(scoring.steps)
    steps = train_steps(
        *(launch, run.module, run.optimizer, run.rate, run.batches, done),
        max_grad_norm=recipe.max_grad_norm,
        seed=recipe.seed,
    )
    too_large = (
        f"A pass over {recipe.batch_size} × {run.stream.length} tokens",
        f"{_START_OVER} smaller --batch-size, an --adapter or a shorter --length. `ropecli plan` shows what fits.",
    )
    with closing(log), closing(steps), explain_out_of_memory(*too_large):
        if not done:
            _validate(run, log, 0)
        while not run.ended(done):
            progress = next(steps)
            done = progress.step
            loss, norm = progress.loss, progress.grad_norm
            if not (math.isfinite(loss) and math.isfinite(norm)):
                what = f"The loss is {loss:g} and the gradient norm {norm:g} at step {done}; both must be finite."
                raise _not_finite(what, checkpoints)
            log.write(asdict(progress))
            if scoring and scoring.steps is None and done >= TIMED_STEPS:
                seconds = progress.tokens / progress.tokens_per_second
                scoring.steps = launch.from_main(partial(scoring.affordable, seconds))
                run.set_steps(scoring.steps)
            run.listener.on_step(progress)
            _validate(run, log, done)
            stopping = interrupt.agreed(launch)
            _save(run, checkpoints, done, stopping=stopping)
            if stopping:
                launch.accelerator.free_memory()
                leave_processes()
                interrupt.stop(f"Saved after step {done}. Run the same command with --resume to continue.")
        if scoring and scoring.best is not None:
            say(f"Keeping step {checkpoints.restore(scoring.best)}, the best.")


def _validate(run: _Run, log: run_folder.RunLog, step: int) -> None:
    if run.scoring and run.scoring.due(step):
        measured = run.scoring.run(run.launch, run.module, step)
        log.write(measured)
        run.scoring.follow(measured)
        run.listener.say(f"Step {step}: {run.scoring.words(measured)}.")


def _save(run: _Run, checkpoints: run_folder.TrainingCheckpoints, step: int, *, stopping: bool) -> None:
    """Save a training checkpoint if it is due after this step."""
    ended, best = run.ended(step), run.scoring.best if run.scoring else None
    due = stopping or ended or step % run.recipe.save_every == 0 or step == best
    if due or run.launch.least(int(time.monotonic() - run.saved)) >= _SAVE_AFTER:
        if not all_finite(run.launch, run.model):  # of other steps, the next loss tells
            raise _not_finite(f"Step {step} gave weights that are not finite.", checkpoints)
        path = checkpoints.save(step, best)
        run.saved = time.monotonic()
        if stopping or not ended:
            run.listener.say(f"Saved {path}.")


def _not_finite(what: str, checkpoints: run_folder.TrainingCheckpoints) -> NotFiniteError:
    return NotFiniteError(
        f"{what} Checkpoints from before that stay in {checkpoints.folder}. {_START_OVER} lower --learning-rate or "
        "more warmup_steps."
    )


def _write(run: _Run) -> None:
    """Write the result. All processes take part, since they hold its shards."""
    launch, whole = run.launch, run.recipe.adapter == "none"
    shards: dict[str, Any] = {}
    if run.unread and run.unread.files and whole:
        shards["gathered"] = run.unread.gathered()
    elif launch.shards:
        shards["state"] = gather_state(launch, run.model, only_trained=not whole)
    try:
        if launch.is_main:
            write_result(run.checkpoint, run.model, run.output, run.settings, save=run.recipe.save, **shards)
    finally:
        deque(shards.get("gathered", ()), maxlen=0)  # all processes gather every tensor, even if writing fails
    launch.wait()
