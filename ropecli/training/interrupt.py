"""Stops a run after the current step on SIGTERM, SIGHUP or Ctrl-C."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ropecli.signals import ECHO_SECONDS, ENDING, Terminated, handled
from ropecli.training.launch import Launch


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
