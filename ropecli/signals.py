"""Turns termination signals into an exception, so that a run can clean up."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

ENDING = (signal.SIGTERM, signal.SIGHUP)
ECHO_SECONDS = 0.5
"""A launcher may forward a signal that its processes already received. Nobody presses Ctrl-C twice this fast."""


class Terminated(SystemExit):
    """Raised on a termination signal. Exit status as in a shell: 143 for SIGTERM, 129 for SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Set the handler of these signals, and restore the previous handlers at the end.

    Ignored signals stay ignored: nohup ignores SIGHUP, and a shell ignores SIGINT for background jobs.
    Does nothing outside the main thread, where Python cannot set handlers.
    """

    def handle(number: int, frame: Any) -> None:
        _leave_closed_terminal()
        handler(number, frame)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    # None: the handler was set by a C library
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
    """Raise Terminated on SIGTERM and SIGHUP."""
    last = -ECHO_SECONDS

    def end(number: int, frame: Any) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > ECHO_SECONDS:  # a forwarded copy would interrupt the cleanup
            raise Terminated(number)

    with handled(ENDING, end):
        yield


def _leave_closed_terminal() -> None:
    """Redirect output to /dev/null if the terminal was closed: a failing write would end the run before it saves."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
