"""SIGTERM, SIGHUP and Ctrl-C as a wish: the run stops where it can be saved."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from ropecli.signals import ECHO_SECONDS, ENDING, Terminated, handled


class Interrupt:
    """Whether this process was asked to stop, and by which signal."""

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
    """Takes these signals over while it lasts. Outside the main thread Python cannot, and none is noticed."""
    interrupt = Interrupt(say)
    with handled((signal.SIGINT, *ENDING), interrupt.ask):
        yield interrupt
