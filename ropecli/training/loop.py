"""The training loop: runs steps, saves checkpoints, and stops on SIGTERM, SIGHUP or Ctrl-C.

A step is one update of the weights, after one or more passes on each process. Its loss is the mean over all its scored
tokens, however they are split over passes and processes. With `loss_weighting: documents` the gradient is that of the
mean over its documents' mean losses (LongAlign, Bai et al. 2024, arXiv:2401.18058, equation 2); the reported loss is
the same. Dropout depends only on the seed and the step number, so a resumed run gives the same bits.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import Batch
from ropecli.errors import NotFiniteError
from ropecli.signals import ECHO_SECONDS, ENDING, Terminated, handled
from ropecli.training.launch import Launch, leave_processes
from ropecli.training.run_folder import TrainingCheckpoints


class Interrupt:
    """A request to stop: a signal that any process received."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._received = 0  # number of the first signal
        self._received_at = 0.0
        self._agreed = 0  # the same on all processes, which receive their signals at different times

    def agreed(self, launch: Launch) -> bool:
        """Return whether any process received a signal: the same on all processes, which call it at the same step."""
        self._agreed = -launch.least(-self._received)
        return self._agreed > 0

    def stop(self, message: str) -> NoReturn:
        """End the run: raises KeyboardInterrupt with `message` (status 130), or prints it and raises Terminated."""
        if self._agreed in ENDING:
            self._say(message)
            raise Terminated(self._agreed)
        raise KeyboardInterrupt(message)

    def ask(self, number: int, frame: Any = None) -> None:
        """Signal handler. A second Ctrl-C raises KeyboardInterrupt."""
        now = time.monotonic()
        if not self._received:
            self._received, self._received_at = number, now
            with contextlib.suppress(RuntimeError):  # the signal interrupted a write to the same stream
                self._say("Stopping after this step. Press Ctrl-C again to stop immediately without saving.")
        elif number == signal.SIGINT and now - self._received_at > ECHO_SECONDS:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None] = lambda message: None) -> Iterator[Interrupt]:
    """Handle SIGINT, SIGTERM and SIGHUP inside the `with` block; only in the main thread, as Python requires."""
    interrupt = Interrupt(say)
    with handled((signal.SIGINT, *ENDING), interrupt.ask):
        yield interrupt


@dataclass(frozen=True)
class TrainingProgress:
    """Metrics of one step. step: from 1. loss: nats per token. learning_rate: of the first parameter group.

    tokens: in this step, tokens_per_second: since the run started or resumed, both over all processes.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    tokens: int


@dataclass
class TrainingLoop:
    """Trains `parameters` with `loss_of`: a NextTokenLoss, or Accelerate's wrapper around one.

    schedule: the learning rate of each group of the optimizer at a step, from 0. batches: this process's batches of a
    step, one per pass. ended: whether to stop after this number of steps. on_step: called after each step, before
    saving. advice: end of the message if the loss is not finite. checkpoints: None saves nothing. interrupt: None
    ignores signals.
    """

    launch: Launch
    loss_of: torch.nn.Module
    parameters: Sequence[torch.nn.Parameter]
    optimizer: Any
    schedule: Callable[[int], Sequence[float]]
    batches: Callable[[int], list[Batch]]
    ended: Callable[[int], bool]
    max_grad_norm: float
    seed: int
    on_step: Callable[[TrainingProgress], None] = lambda progress: None
    checkpoints: TrainingCheckpoints | None = None
    interrupt: Interrupt | None = None
    advice: str = ""

    def train(self, done: int = 0) -> None:
        """Train from step `done`, as checkpoints.restore returns. Raises NotFiniteError. A signal saves and stops.

        Nothing within a step waits for the device: its numbers are read once, at the end, by one reduction, which also
        counts the tokens of the next step's batches. These are made ahead in a thread.
        """
        self._started, self._tokens = time.monotonic(), 0
        with ThreadPoolExecutor(1, "batches") as thread:
            batches = self.batches(done)
            counts = self.launch.total(*_counts(batches))
            while not self.ended(done):
                coming = thread.submit(self.batches, done + 1)
                progress, batches, counts = self._update(done, batches, counts, coming.result)
                done = progress.step
                self._finish(progress)

    def _finish(self, progress: TrainingProgress) -> None:
        """Report a step, save if it is due, and stop after a signal."""
        done = progress.step
        self.on_step(progress)
        stopping, ended = self.interrupt is not None and self.interrupt.agreed(self.launch), self.ended(done)
        due = self.checkpoints is not None and self.checkpoints.due(done)
        if stopping or ended or due:
            # of other steps, the next loss tells
            if not self.launch.all_finite(self.parameters):
                raise NotFiniteError(f"Step {done} gave weights that are not finite. {self.advice}")
            if self.checkpoints:
                self.checkpoints.save(done, last=ended and not stopping)
        if self.interrupt and stopping:
            self.launch.accelerator.free_memory()
            leave_processes()
            self.interrupt.stop(f"Saved after step {done}. Run the same command with --resume to continue.")

    def _update(
        self, done: int, batches: list[Batch], counts: list[float], coming: Callable[[], list[Batch]]
    ) -> tuple[TrainingProgress, list[Batch], list[float]]:
        """Update the weights. counts: of the batches, over all processes. Returns the next batches and counts too."""
        before = self._tokens
        torch.manual_seed(self.seed + done)
        rates = self.schedule(done)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        targets, weight = (count / self.launch.sequence_ranks for count in counts)
        # engines average over processes and passes; this scale makes that the mean over all scored tokens or documents
        scale = self.launch.world * len(batches) / weight
        nll = sum(self._pass(batch, scale) for batch in batches)
        norm = self.launch.clip(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        batches = coming()
        total, *counts = self.launch.total(nll, *_counts(batches))
        loss, grad_norm = total / targets, float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NotFiniteError(
                f"The loss is {loss:g} and the gradient norm {grad_norm:g} at step {done + 1}; both must be finite. "
                f"{self.advice}"
            )
        tokens = (self._tokens - before) * self.launch.world
        speed = self._tokens * self.launch.world / (time.monotonic() - self._started)
        return TrainingProgress(done + 1, loss, rates[0], grad_norm, speed, tokens), batches, counts

    def _pass(self, batch: Batch, scale: float) -> torch.Tensor:
        """Run forward and backward. Returns the summed, unweighted loss of this process's tokens, nats, float64."""
        share = self.launch.take(batch)
        with self.launch.accelerator.accumulate(self.loss_of):
            nll = self.loss_of(*share)
            self.launch.accelerator.backward(nll * scale)
        self._tokens += share.ids.numel()
        return nll.detach().double()


def _counts(batches: Sequence[Batch]) -> tuple[int, float]:
    """The number of scored tokens, and their weight."""
    return sum(int((batch.labels != UNSCORED).sum()) for batch in batches), sum(batch.weight for batch in batches)
