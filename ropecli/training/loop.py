"""The training loop: passes, updates, training checkpoints, and a stop on SIGTERM, SIGHUP or Ctrl-C.

A step is one update of the weights, made of `gradient_accumulation` passes on each process. The loss of a step is the
mean over all its scored tokens on all processes, however they are spread over passes and processes.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import Batch, Stream
from ropecli.errors import NotFiniteError
from ropecli.signals import ECHO_SECONDS, ENDING, Terminated, handled
from ropecli.training.distributed import averaged_over, clip_gradients, data_ranks, leave_group, local_batch
from ropecli.training.loss import explain_out_of_memory
from ropecli.training.optimization import Divergence, learning_rate_at, losses_until
from ropecli.training.output.metrics_log import MetricsLog, Trackers
from ropecli.training.output.training_checkpoints import ResumePoint, restore_newest, save_checkpoint
from ropecli.training.recipe import Recipe
from ropecli.training.validation import Validation


class Interrupt:
    """A request to stop: whether this process got a signal, and which."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._asked = 0  # the first signal's number
        self._asked_at = 0.0
        self._agreed = 0  # the same in all processes; apart from the above, as each gets its signal in its own time

    def agreed(self, accelerator) -> bool:
        """Whether any process was asked: the same answer in all of them, which must ask at the same pass."""
        self._agreed = self._asked
        if accelerator.num_processes > 1:
            asked = torch.tensor([self._asked], device=accelerator.device)
            self._agreed = int(accelerator.gather(asked).max())
        return self._agreed > 0

    def stop(self, message: str) -> NoReturn:
        """Says `message` and ends the run: raises KeyboardInterrupt (exit status 130), or Terminated (143, 129)."""
        self._say(message)
        if self._agreed in ENDING:
            raise Terminated(self._agreed)
        raise KeyboardInterrupt(message)

    def ask(self, number: int, frame: Any = None) -> None:
        """The handler of the signals. A second Ctrl-C raises KeyboardInterrupt."""
        now = time.monotonic()
        if not self._asked:
            self._asked, self._asked_at = number, now
            with contextlib.suppress(RuntimeError):  # the signal came amid another line on the same stream
                self._say("Stopping after this pass; Ctrl-C once more to stop at once, without saving.")
        elif number == signal.SIGINT and now - self._asked_at > ECHO_SECONDS:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None] = lambda message: None) -> Iterator[Interrupt]:
    """Handles these signals inside the `with` block. Outside the main thread Python cannot, and none is noticed."""
    interrupt = Interrupt(say)
    with handled((signal.SIGINT, *ENDING), interrupt.ask):
        yield interrupt


@dataclass(frozen=True)
class TrainingProgress:
    """What a step reports. loss: nats per token. tokens_per_second: of this run, all processes together."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float


@dataclass
class TrainingLoop:
    """The loop of one run, over what Accelerate prepared. say, on_step: finetune_checkpoint's, on the main process."""

    accelerator: Any
    wrapped: torch.nn.Module
    optimizer: Any
    recipe: Recipe
    stream: Stream
    output: Path
    validation: Validation | None
    trackers: Trackers
    interrupt: Interrupt
    say: Callable[[str], None]
    on_step: Callable[[TrainingProgress], None]

    def train(self) -> None:
        """Trains from the newest checkpoint, or from the start.

        Raises DivergedError, NotFiniteError, RopecliError where memory does not suffice, or to stop.
        """
        point, summed = restore_newest(self.accelerator, self.wrapped, self.output, self.say)
        if point != ResumePoint(0):
            self.say(f"going on after {point}")
        # a run that starts over measures again what was measured before the first step
        known = point.step if point > ResumePoint(0) else -1
        self._log = MetricsLog(self.output, known) if self.accelerator.is_main_process else None
        self._divergence = Divergence.from_losses(
            self._earlier_losses(point.step), self.recipe.max_loss_rise, self.output
        )
        if point == ResumePoint(0):
            self._validate(0)
        self._begun, self._tokens = time.monotonic(), 0
        for step in range(point.step, self.recipe.steps):
            part, begun = (point.passes, summed) if step == point.step else (0, 0.0)
            with self._explain_out_of_memory():
                loss, grad_norm = self._update(step, part, begun)
            self._report(
                TrainingProgress(step + 1, loss, learning_rate_at(step, self.recipe), grad_norm, self._speed())
            )
            self._save_if_due(step + 1)

    def _earlier_losses(self, step: int) -> dict[int, float]:
        """The main process's, in all of them: they must find a divergence together."""
        from accelerate.utils import broadcast_object_list

        found = losses_until(self.output, step) if self.accelerator.is_main_process else None
        return broadcast_object_list([found])[0]

    def _update(self, step: int, first: int, summed: float) -> tuple[float, float]:
        """The passes from `first` on, whose loss adds to `summed`, and the update. Gives (loss, gradient norm)."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(step, self.recipe)
        batches = [self._batch(step, part) for part in range(self.recipe.gradient_accumulation)]
        targets = self._sum(sum(int((batch.labels != UNSCORED).sum()) for batch in batches)) / self._copies
        # engines average over processes and passes; so scaled, the average is the mean over all scored tokens
        scale = averaged_over(self.accelerator) * len(batches) / targets
        for part, batch in enumerate(batches[first:], first):
            summed += self._pass(batch, scale)
            last = part + 1 == len(batches)
            if not last and self._holds_whole_gradients and self.interrupt.agreed(self.accelerator):
                self._save(ResumePoint(step, part + 1), summed)
                self._stop(ResumePoint(step, part + 1))
        loss = self._sum(summed) / targets
        grad_norm = clip_gradients(self.accelerator, self.wrapped, self.recipe.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NotFiniteError(
                f"The loss is {loss:g} and the gradient {grad_norm:g} at step {step + 1}, and the run ends. "
                f"{self._divergence.kept()} Begin again with a lower learning_rate or more warmup_steps, into another "
                "--output."
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, grad_norm

    def _explain_out_of_memory(self) -> contextlib.AbstractContextManager[None]:
        return explain_out_of_memory(
            f"A pass over {self.recipe.batch_size} × {self.stream.length} tokens",
            "Begin again with a smaller batch_size, an adapter or shorter sequences, into another --output; `ropecli "
            "plan` says what fits.",
        )

    def _batch(self, step: int, part: int) -> Batch:
        """This process's sequences of one pass: processes side by side, passes one after the other."""
        rank, ranks = data_ranks(self.accelerator)
        at = ((step * self.recipe.gradient_accumulation + part) * ranks + rank) * self.recipe.batch_size
        return self.stream.batch(range(at, at + self.recipe.batch_size))

    def _pass(self, batch: Batch, scale: float) -> float:
        """Forward and backward; the summed negative log-likelihood of this process's tokens, nats."""
        with self.accelerator.accumulate(self.wrapped), local_batch(self.accelerator, batch) as share:
            nll = self.wrapped(share.ids, share.labels, share.positions, share.packed)
            self.accelerator.backward(nll * scale)
        self._tokens += share.ids.numel()
        return float(nll.detach())

    def _sum(self, value: float) -> float:
        if self.accelerator.num_processes == 1:
            return value
        return float(self.accelerator.reduce(torch.tensor(value, dtype=torch.float64, device=self.accelerator.device)))

    @property
    def _copies(self) -> int:
        """How many processes read each sequence."""
        return self.accelerator.num_processes // data_ranks(self.accelerator)[1]

    def _speed(self) -> float:
        return self._tokens * self.accelerator.num_processes / (time.monotonic() - self._begun)

    def _report(self, progress: TrainingProgress) -> None:
        if self._log:
            self._log.write(asdict(progress))
        self.trackers.log(asdict(progress))
        self.on_step(progress)
        self._divergence.add(progress.step, progress.loss)
        self._validate(progress.step)

    def _validate(self, step: int) -> None:
        """Perplexity on held-out text, where it is due; before the first step too."""
        if self.validation and self.validation.due(step):
            measured = self.validation.run(self.accelerator, self.wrapped, step)
            if self._log:
                self._log.write(measured)
            self.trackers.log(measured)

    def _save_if_due(self, step: int) -> None:
        """A checkpoint where one is due, and the end where one was asked for."""
        stopping = self.interrupt.agreed(self.accelerator)
        last = step == self.recipe.steps
        due = step % self.recipe.save_every == 0
        if last or due or stopping:
            self._save(ResumePoint(step))
        if stopping and not last:
            self._stop(ResumePoint(step))

    def _save(self, point: ResumePoint, summed: float = 0.0) -> None:
        save_checkpoint(
            self.accelerator,
            self.wrapped,
            self.output,
            point,
            self.recipe.keep_checkpoints,
            loss=summed,
            spare=self._divergence.last_good,
        )

    def _stop(self, point: ResumePoint) -> NoReturn:
        leave_group(self.accelerator)
        self.interrupt.stop(f"Saved after {point}; the same command with --resume goes on.")

    @property
    def _holds_whole_gradients(self) -> bool:
        from accelerate import DistributedType

        sharded = (DistributedType.FSDP, DistributedType.DEEPSPEED)
        return self.accelerator.distributed_type not in sharded
