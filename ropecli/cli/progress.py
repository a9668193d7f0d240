"""What commands say while they run, on standard error: warnings, sentences and a progress bar."""

import contextlib
import logging
from collections.abc import Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ropecli.cli.terminal import err, warn
from ropecli.commands.messages import Step, command_line, progress_bars


class _Handler(logging.Handler):
    """Prints what a command says."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        else:
            err.print(record.getMessage(), markup=False, soft_wrap=True)


@contextlib.contextmanager
def shown_progress(typed: tuple[str, ...]) -> Iterator[None]:
    """While it lasts, commands speak to the terminal. typed: the command line, for reports."""
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


@contextlib.contextmanager
def _bar(description: str, total: int | None) -> Iterator[Step]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=err, transient=True, disable=not err.is_terminal)
    with bar as progress:
        task = progress.add_task(description, total=total)

        def step(*, done: int | None = None, text: str | None = None) -> None:
            progress.update(task, advance=1 if done is None else None, completed=done, description=text)

        yield step
