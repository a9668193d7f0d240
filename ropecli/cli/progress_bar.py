"""The progress bar, on standard error."""

import contextlib
from collections.abc import Callable, Iterator

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ropecli.cli.terminal import err


@contextlib.contextmanager
def progress_bar(description: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Gives a function to call once a step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
