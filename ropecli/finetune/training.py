"""The training loop: full parameters, exact resume, one process or many through Accelerate."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ropecli.checkpoint.plan import window_in_effect
from ropecli.checkpoint.reading import Checkpoint, section_of
from ropecli.data import sources
from ropecli.data.documents import read_documents
from ropecli.data.sequences import Sequences
from ropecli.errors import DataError, RecipeError, RopecliError
from ropecli.evaluate.loading import load_model, load_tokenizer
from ropecli.finetune.loss import NextTokenLoss
from ropecli.finetune.recipe import Recipe
from ropecli.finetune.state import MetricsLog, begin, last_checkpoint, own_folder, refuse_foreign, save_checkpoint
from ropecli.finetune.writing import clear_finished, finished_step, write_finetuned


@dataclass(frozen=True)
class Progress:
    """What a step reports. loss: nats per token. tokens_per_second: of this run, all processes together."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float


def finetune_checkpoint(
    checkpoint: Checkpoint,
    recipe: Recipe,
    output: Path,
    *,
    resume: bool = False,
    say: Callable[[str], None] = lambda message: None,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Fine-tunes `checkpoint` into the folder `output`, which stock transformers then loads.

    say: told in sentences what is used and left out. on_step: called after each step. Both on the main process
    alone. Raises DataError, OutputError, RecipeError, and RopecliError for a loss that is not finite.
    """
    if recipe.data == sources.DEMO:
        raise DataError("'demo' is the held-out text that eval-ppl measures on; train on 'demo-train'.")
    refuse_foreign(output, resume)
    length = recipe.length or window_in_effect(checkpoint)
    texts = sources.read_texts(recipe.data, text_column=recipe.text_column, split=recipe.split, splits=sources.TO_TRAIN)
    documents = read_documents(texts, load_tokenizer(checkpoint), length, most=recipe.max_documents)
    sequences = Sequences(documents, length, recipe.seed)
    accelerator = _make_accelerator(recipe)
    loss_of = _prepare_model(checkpoint, recipe)
    if not accelerator.is_main_process:
        say, on_step = (lambda message: None), (lambda progress: None)
    say(
        f"{len(sequences)} sequences of {length} tokens from {len(documents.kept)} documents; "
        f"{documents.too_short} documents were shorter, {sequences.dropped_tokens} tokens filled no sequence."
    )
    for warning in _warnings(checkpoint, recipe, length):
        say(f"warning: {warning}")
    asked = {
        "source": checkpoint.origin(),
        "data": documents.fingerprint(),
        "length": length,
        "processes": accelerator.num_processes,
        "recipe": recipe.model_dump(mode="json"),
    }
    with own_folder(output) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process:
            begin(output, asked, resume)
        accelerator.wait_for_everyone()
        if (steps := finished_step(output)) is not None:
            say(f"{output} is done already, after {steps} steps.")
            if accelerator.is_main_process:
                clear_finished(output)
            return
        trained = _train(accelerator, loss_of, recipe, sequences, output, say, on_step)
        if accelerator.is_main_process:
            write_finetuned(checkpoint, accelerator.unwrap_model(trained).model, output, asked)
        accelerator.wait_for_everyone()
    accelerator.end_training()


def _warnings(checkpoint: Checkpoint, recipe: Recipe, length: int) -> list[str]:
    warnings = []
    if recipe.warmup_steps >= recipe.steps:
        warnings.append(f"{recipe.warmup_steps} warm-up steps of {recipe.steps}: the full rate is not reached.")
    window = window_in_effect(checkpoint)
    if length > window:
        warnings.append(f"sequences of {length} tokens exceed the checkpoint's window, {window}: patch it first.")
    if section_of(checkpoint.config).get("router_aux_loss_coef"):
        warnings.append("the routers' load-balancing loss is left out; only the next-token loss is trained on.")
    return warnings


def learning_rate_at(step: int, recipe: Recipe) -> float:
    """The rate of step 0, 1, ...: linear warm-up, then constant, or a cosine to a tenth at the last step."""
    warm = min(1.0, (step + 1) / (recipe.warmup_steps + 1))
    if recipe.schedule == "constant":
        return recipe.learning_rate * warm
    past = max(0.0, step - recipe.warmup_steps) / max(1, recipe.steps - 1 - recipe.warmup_steps)
    return recipe.learning_rate * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, past))))


def _make_accelerator(recipe: Recipe):
    from accelerate import Accelerator, DistributedType
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # it would hold a second run in this process to the first one's precision
    precision = "no" if recipe.mixed_precision == "none" else recipe.mixed_precision
    accelerator = Accelerator(mixed_precision=precision, cpu=not torch.cuda.is_available())
    if accelerator.distributed_type not in (
        DistributedType.NO,
        DistributedType.MULTI_GPU,
        DistributedType.MULTI_CPU,
    ):
        raise RecipeError(
            f"Accelerate is set up for {accelerator.distributed_type.value}; finetune runs on one process, or on "
            "several with plain data parallelism (MULTI_GPU, MULTI_CPU)."
        )
    return accelerator


def _prepare_model(checkpoint: Checkpoint, recipe: Recipe) -> NextTokenLoss:
    """Master weights in float32; mixed precision is autocast's affair."""
    model = load_model(checkpoint, dtype="float32", device="cpu")
    loss_of = NextTokenLoss(model)
    model.train()
    if recipe.gradient_checkpointing:
        # non-reentrant is the default of transformers 5; the older name of this switch is on its way out
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return loss_of


def _make_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; weight decay on matrices alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)


def _train(
    accelerator,
    loss_of: NextTokenLoss,
    recipe: Recipe,
    sequences: Sequences,
    output: Path,
    say: Callable[[str], None],
    on_step: Callable[[Progress], None],
) -> torch.nn.Module:
    """Trains from the newest checkpoint in `output`, or from the start; returns the wrapped model."""
    torch.manual_seed(recipe.seed)
    wrapped, optimizer = accelerator.prepare(loss_of, _make_optimizer(loss_of, recipe))
    first = 0
    if found := last_checkpoint(output):
        first, folder = found
        accelerator.load_state(str(folder))
    if first:
        say(f"going on after step {first}")
    log = MetricsLog(output, first) if accelerator.is_main_process else None
    begun = time.monotonic()
    for step in range(first, recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, recipe)
        loss = _accumulate(accelerator, wrapped, recipe, sequences, step)
        grad_norm = accelerator.clip_grad_norm_(wrapped.parameters(), recipe.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(float(grad_norm))):
            raise RopecliError(
                f"The loss is {loss:g} and the gradient {float(grad_norm):g} at step {step + 1}; the weights were "
                "not touched. Lower learning_rate, or raise warmup_steps."
            )
        optimizer.step()
        optimizer.zero_grad()
        if log:
            tokens = (step + 1 - first) * _sequences_per_step(accelerator, recipe) * sequences.length
            speed = tokens / (time.monotonic() - begun)
            progress = Progress(step + 1, loss, learning_rate_at(step, recipe), float(grad_norm), speed)
            log.write(asdict(progress))
            on_step(progress)
        if (step + 1) % recipe.save_every == 0 or step + 1 == recipe.steps:
            save_checkpoint(accelerator, output, step + 1, recipe.keep_checkpoints)
    return wrapped


def _accumulate(accelerator, loss_of, recipe: Recipe, sequences: Sequences, step: int) -> float:
    """Adds up the gradients of one step; returns its mean loss over all processes, nats per token."""
    start = step * _sequences_per_step(accelerator, recipe) + accelerator.process_index * recipe.batch_size
    total = torch.zeros((), device=accelerator.device)
    for part in range(recipe.gradient_accumulation):
        at = start + part * recipe.batch_size * accelerator.num_processes
        ids = torch.from_numpy(sequences.batch(range(at, at + recipe.batch_size))).to(accelerator.device)
        last = part + 1 == recipe.gradient_accumulation
        with nullcontext() if last else accelerator.no_sync(loss_of):
            loss = loss_of(ids) / recipe.gradient_accumulation
            accelerator.backward(loss)
        total += loss.detach()
    return float(accelerator.reduce(total, "mean"))


def _sequences_per_step(accelerator, recipe: Recipe) -> int:
    return recipe.batch_size * recipe.gradient_accumulation * accelerator.num_processes
