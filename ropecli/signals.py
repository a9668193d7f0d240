"""Signals that end a program: they become an exception, so that the run cleans up behind itself."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))  # Windows has no SIGHUP
ECHO_SECONDS = 0.5
"""A launcher may send on what all its processes got already. No one presses Ctrl-C twice so fast."""


class Terminated(SystemExit):
    """A signal was obeyed. The exit status is the one that a shell reports for it: 143 for SIGTERM, 129 for SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Sets the handler of these signals, and sets the previous ones again at the end.

    Signals that are ignored stay so: nohup ignores SIGHUP, and a shell SIGINT for what runs in its background.
    Python sets handlers in the main thread alone; in another one this does nothing.
    """

    def handle(number: int, frame: Any) -> None:
        _leave_closed_terminal()
        handler(number, frame)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    # None: set by a library in C
    taken = {number: previous for number, previous in before.items() if previous not in (None, signal.SIG_IGN)}
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, previous in taken.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def terminated_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Terminated."""
    last = -ECHO_SECONDS

    def end(number: int, frame: Any) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > ECHO_SECONDS:  # an echo would interrupt the cleaning up
            raise Terminated(number)

    with handled(ENDING, end):
        yield


def _leave_closed_terminal() -> None:
    """Every write to a terminal that was closed fails, and would end the run before it has saved."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
