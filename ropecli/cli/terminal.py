"""Console output: results on standard output; messages, warnings and progress of a command on standard error.

Rich draws tables and the bar on a terminal, and is imported for these only. Elsewhere tables are Markdown, and progress
is lines.
"""

import contextlib
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import typer

from ropecli.errors import shortened
from ropecli.messages import Step, command_line, duration, progress_bars
from ropecli.ranks import read_ranks

if TYPE_CHECKING:
    from rich.status import Status

    from ropecli.table import Table

# Control characters in names or configs from strangers must not reach the terminal.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
_MESSAGE_LINES = 20
"""Lines of one message."""


@dataclass
class _Stream:
    """A standard stream. quiet: whether nothing is printed. verbose: of the result. as_json: of errors."""

    name: str
    quiet: bool = False
    verbose: bool = False
    as_json: bool = False

    @property
    def file(self) -> TextIO:
        stream: TextIO | None = getattr(sys, self.name)
        return stream or io.StringIO()  # closed, as by >&-

    @property
    def has_colour(self) -> bool:
        return self.file.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"

    def print(self, text: str, *, label: str = "", colour: str = "") -> None:
        """Print a line. label: in colour, before the text. colour: of the whole text without a label."""
        if self.quiet:
            return
        text, sign = text.translate(_CONTROLS), f"{label} " * bool(label)
        if colour and self.has_colour:
            sign, text = (typer.style(label, fg=colour) + " ", text) if label else ("", typer.style(text, fg=colour))
        self.file.write(f"{sign}{text}\n")


out, err = _Stream("stdout"), _Stream("stderr")


def set_verbosity(*, quiet: bool = False, verbose: bool = False, as_json: bool = False, shared: bool = False) -> None:
    """Set what this process prints.

    as_json: whether errors are JSON. shared: whether the processes of a launch share the work; then only the first
    prints anything but its own errors.
    """
    later = shared and read_ranks().rank > 0
    out.quiet, err.quiet = later, later or quiet
    out.verbose, err.as_json = verbose, as_json


def fail(message: str) -> None:
    err.quiet = False  # quiet processes still print why they end
    if err.as_json:
        err.file.write(json.dumps({"error": message}) + "\n")
    else:
        err.print(_bounded(message), label="error:", colour="red")


def warn(message: str) -> None:
    err.print(_bounded(message), label="warning:", colour="yellow")


def tell(text: str, stream: _Stream = out) -> None:
    """Print a line of the result. stream: `err` for other lines."""
    stream.print(text)


def show_tables(tables: Iterable["Table"]) -> None:
    """Print tables, each after an empty line but the first: as Markdown where standard output is no terminal."""
    if out.quiet:
        return
    from ropecli.table import markdown

    on_terminal = out.file.isatty()
    for number, table in enumerate(tables):
        out.file.write("\n" * bool(number))
        if on_terminal:
            from rich.console import Console

            from ropecli.cli.terminal_table import terminal_table

            Console(highlight=False, emoji=False).print(terminal_table(table))
        else:
            out.file.write(markdown(table) + "\n")


def _bounded(message: str) -> str:
    """The message without the middle of long lines and lists: values from the user or a file can be of any length."""
    lines = [shortened(line) for line in message.split("\n")]
    return "\n".join(lines if len(lines) <= _MESSAGE_LINES else [*lines[: _MESSAGE_LINES - 2], "  ...", lines[-1]])


def print_json(value: Any) -> None:
    """Print JSON on standard output, with null for infinities and NaN."""
    if not out.quiet:
        finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
        out.file.write(json.dumps(finite, indent=2) + "\n")


def show_changes(file: str, changes: Iterable[tuple[str, Any, Any]]) -> None:
    """Print the changes of a JSON file: (path, before, after) of each value."""
    from ropecli.config.changes import ABSENT

    tell(f"Changes to {file}:")
    for path, *values in changes:
        tell(f"  {path}")
        for sign, value, colour in zip("-+", values, ("red", "green"), strict=True):
            out.print(f"    {sign} {value if value == ABSENT else json.dumps(value)}", colour=colour)


class _Handler(logging.Handler):
    """Prints log records of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        else:
            tell(record.getMessage(), err)


@contextlib.contextmanager
def shown_progress(typed: tuple[str, ...]) -> Iterator[None]:
    """Print messages and progress of commands inside the `with` block. typed: the command line, for reports."""
    log, handler = logging.getLogger("ropecli"), _Handler()
    bars, line = progress_bars.set(_bar), command_line.set(typed)
    log.addHandler(handler)
    log.propagate, before = False, log.propagate
    try:
        yield
    finally:
        log.propagate = before
        log.removeHandler(handler)
        progress_bars.reset(bars)
        command_line.reset(line)


_SECONDS = 30
"""Between two lines of progress where there is no terminal."""
_bars: "list[_Bar]" = []
"""The bars that are open, each within the one before."""


@contextlib.contextmanager
def _bar(description: str, total: int | None) -> Iterator[Step]:
    """A line of a terminal, which all bars share; elsewhere, as in a cluster's log, a line every 30 seconds."""
    with contextlib.ExitStack() as stack:
        line = _bars[-1].line if _bars else None
        if not _bars and err.file.isatty() and not err.quiet:
            from rich.console import Console
            from rich.status import Status

            line = stack.enter_context(Status("", console=Console(stderr=True, highlight=False, emoji=False)))
        _bars.append(_Bar(description, total, line))
        try:
            yield _bars[-1]
        finally:
            _bars.pop()
            if line and _bars:
                _bars[-1].show()


class _Bar:
    """line: of the terminal; None for a log."""

    def __init__(self, description: str, total: int | None, line: "Status | None") -> None:
        self.description, self.total, self.line = description, total, line
        self.done, self.state = 0.0, ""
        self.started = self.printed = time.monotonic()
        self.first: float | None = None
        self.show()

    def __call__(
        self, *, done: float | None = None, text: str = "", phase: str | None = None, left: float | None = None
    ) -> None:
        now = time.monotonic()
        if phase is not None:
            begins = phase != self.description
            self.description, self.started, self.first = phase, now, None
            if self.line or begins:
                self.show()
            return
        self.done = self.done + 1 if done is None else done
        if self.first is None:
            self.first = self.done - (1 if done is None or done > 1 else 0)  # a resumed run does not start at 0
        if self.total and left is None and self.done > self.first:
            left = (now - self.started) * (self.total - self.done) / (self.done - self.first)
        share = f"{self.done / self.total:.0%}" if self.total else f"{self.done:g}"
        time_left = "" if left is None else f"{duration(left)} left"
        self.state = "  ".join(filter(None, [share, text, time_left]))
        if self.line or now - self.printed >= _SECONDS:
            self.printed = now
            self.show()

    def show(self) -> None:
        if not self.line:
            if self.description:
                tell("  ".join(filter(None, [self.description, self.state])), err)
            return
        state = self.state or (_bars[0].state if _bars else "")
        self.line.update("  ".join(filter(None, [self.description, state])).translate(_CONTROLS))
