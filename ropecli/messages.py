"""Messages and progress of a running command: the logger `ropecli`, a progress bar, times and sizes as text.

The command line sets the bar. From Python there is no bar, and warnings go to standard error through logging.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

_LOG = logging.getLogger("ropecli")
_LOG.setLevel(logging.INFO)


class Step(Protocol):
    """Call it after each step.

    done: steps so far, if not one more than before. text: details, such as the loss. phase: what begins now, instead
    of a step. left: seconds to the end, if not proportional to the steps.
    """

    def __call__(
        self, *, done: float | None = None, text: str = "", phase: str | None = None, left: float | None = None
    ) -> None: ...


MakeBar = Callable[[str, int | None], AbstractContextManager[Step]]
"""Takes a description and the number of steps, None if unknown. A bar within another takes its place for a while."""


@contextlib.contextmanager
def _no_bar(description: str, total: int | None) -> Iterator[Step]:
    yield lambda **_: None


progress_bars: ContextVar[MakeBar] = ContextVar("progress_bars", default=_no_bar)
command_line: ContextVar[tuple[str, ...]] = ContextVar("command_line", default=())
"""The typed words, for reports; empty for calls from Python."""


def warn(message: str) -> None:
    _LOG.warning("%s", message)


def say(message: str) -> None:
    _LOG.info("%s", message)


class Span(NamedTuple):
    """A part of a sequence. is_trained: whether it is trained on; None for a remark, which the model does not get."""

    text: str
    is_trained: bool | None = None


def say_opening(*names: object) -> None:
    """Call it before torch is imported, which takes seconds."""
    say(f"Opening {', '.join(map(str, names))} ...")


def marked(spans: Sequence[Span]) -> str:
    """The sequence with remarks on lines of their own, and what is trained on in double brackets."""
    parts = []
    for text, is_trained in spans:
        parts.append(f"\n--- {text} ---\n" if is_trained is None else f"[[{text}]]" if is_trained else text)
    return "".join(parts).strip("\n")


def progress_bar(description: str, total: int | None) -> AbstractContextManager[Step]:
    return progress_bars.get()(description, total)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def size(count: float) -> str:
    """Format bytes as kB, MB or GB, in powers of 1,000 as the Hub and makers of GPUs do."""
    if count < 1e6:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"
