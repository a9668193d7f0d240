"""Prints warnings, messages and progress of a running command on standard error."""

import contextlib
import logging
import time
from collections.abc import Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ropecli.cli.terminal import err, show_spans, warn
from ropecli.messages import Step, command_line, duration, progress_bars


class _Handler(logging.Handler):
    """Prints log records of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        elif spans := getattr(record, "spans", None):
            show_spans(err, spans)
        else:
            _print(record.getMessage())


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


@contextlib.contextmanager
def _bar(description: str, total: int | None) -> Iterator[Step]:
    """A progress bar on a terminal; elsewhere, as in a cluster's log, a line at the start and every 30 seconds."""
    if not err.is_terminal:
        yield _LogLines(description, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=err.quiet) as progress:
        task = progress.add_task(description, total=total)

        def step(*, done: int | None = None, text: str | None = None, phase: str | None = None) -> None:
            advance = 1 if done is None and phase is None else None
            progress.update(task, advance=advance, completed=done, description=phase or text)

        yield step


class _LogLines:
    def __init__(self, description: str, total: int | None) -> None:
        self.description, self.total, self.done = description, total, 0
        self.started = self.printed = time.monotonic()
        self.first: int | None = None
        _print(description + (f" 0/{total}" if total else ""))

    def __call__(self, *, done: int | None = None, text: str | None = None, phase: str | None = None) -> None:
        if phase is not None:
            self.description, self.started, self.first = phase, time.monotonic(), None
            _print(phase)
            return
        self.done = self.done + 1 if done is None else done
        if self.first is None:
            self.first = self.done - 1  # a resumed run does not start at 0
        now = time.monotonic()
        if now - self.printed >= _SECONDS:
            self.printed = now
            _print(self._line(text, now - self.started))

    def _line(self, text: str | None, elapsed: float) -> str:
        if not self.total:
            return f"{self.description} {self.done}, {duration(elapsed)}"
        left = elapsed * (self.total - self.done) / (self.done - (self.first or 0))
        detail = f", {text}" if text else ""
        return f"{self.description} {self.done}/{self.total}{detail}, {duration(left)} left"


def _print(line: str) -> None:
    err.print(line, markup=False, soft_wrap=True)
