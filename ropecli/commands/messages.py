"""How a command speaks while it runs: sentences by the logger `ropecli`, progress by a bar that the command line sets.

From Python, warnings show on standard error as those of any logger do, and no bar is drawn.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

_LOG = logging.getLogger("ropecli")
_LOG.setLevel(logging.INFO)


class Step(Protocol):
    """To be called once a step. done: steps so far, where it is called less often. text: shown before the bar."""

    def __call__(self, *, done: int | None = None, text: str | None = None) -> None: ...


MakeBar = Callable[[str, int | None], AbstractContextManager[Step]]
"""Takes a description and the number of steps, None where it is not known."""


@contextlib.contextmanager
def _no_bar(description: str, total: int | None) -> Iterator[Step]:
    def step(*, done: int | None = None, text: str | None = None) -> None: ...

    yield step


progress_bars: ContextVar[MakeBar] = ContextVar("progress_bars", default=_no_bar)
command_line: ContextVar[tuple[str, ...]] = ContextVar("command_line", default=())
"""What was typed, for reports; empty where a command is called from Python."""


def warn(message: str) -> None:
    _LOG.warning("%s", message)


def say(message: str) -> None:
    _LOG.info("%s", message)


def progress_bar(description: str, total: int | None) -> AbstractContextManager[Step]:
    return progress_bars.get()(description, total)
