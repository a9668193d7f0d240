"""Console output: results on standard output; messages, warnings and progress of a command on standard error."""

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table as RichTable
from rich.text import Text

from ropecli.config.changes import ABSENT
from ropecli.errors import shortened
from ropecli.messages import Span, Step, command_line, duration, plain_text, progress_bars
from ropecli.ranks import read_ranks
from ropecli.table import LONGEST_TEXT, Bold, Table, clean, markdown

# Control characters in names or configs from strangers must not reach the terminal.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}

_MESSAGE_LINES = 20
"""Lines of one message."""
_UNBOUNDED = 10**4
_NARROW = 18
"""Characters of a column before it is folded, if space is short."""


class _Console(Console):
    verbose = as_json = False

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(text.translate(_CONTROLS), **options)


out = _Console(highlight=False, emoji=False)
err = _Console(stderr=True, highlight=False, emoji=False)


def set_verbosity(*, quiet: bool, verbose: bool, as_json: bool = False, shared: bool = False) -> None:
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
        return
    err.print("[bold red]error:[/]", end=" ")
    tell(_bounded(message), err)


def warn(message: str) -> None:
    err.print("[yellow]warning:[/]", end=" ")
    tell(_bounded(message), err)


def tell(text: str, console: Console = out) -> None:
    """Print a line of the result. console: `err` for other lines."""
    console.print(text, markup=False, soft_wrap=True)


def show_spans(console: Console, spans: Sequence[Span]) -> None:
    """Print a training sequence: what is trained on is green, or in double brackets where there is no colour."""
    if console.color_system is None:
        tell(plain_text(spans).translate(_CONTROLS), console)
        return
    text = Text()
    for part, is_trained in spans:
        if is_trained is None:
            text.append(f"\n--- {part} ---\n", "dim")
        else:
            text.append(part.translate(_CONTROLS), "green" if is_trained else "")
    console.print(text, soft_wrap=True)


def show_tables(tables: Iterable[Table]) -> None:
    """Print tables, each after an empty line but the first; in a pipe or file, as Markdown."""
    for number, table in enumerate(tables):
        shown = TerminalTable(table) if out.is_terminal else Text(markdown(table))
        out.print(*[""] * bool(number), shown, sep="\n", soft_wrap=not out.is_terminal)


class TerminalTable:
    """A Table for rich, with its title and notes.

    If the terminal is too narrow, the columns are split into several blocks, and each repeats the names.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        def fits(block: RichTable) -> bool:
            width = Measurement.get(console, options.update(max_width=_UNBOUNDED), block)
            return width.maximum <= options.max_width

        if self.table.title:
            yield _text(self.table.title)
        columns = range(self.table.names, len(self.table.heads))
        unfolded, names = self._block(columns, _UNBOUNDED, _UNBOUNDED), options.max_width * 9 // 20
        if not columns or fits(unfolded):
            yield unfolded
        else:
            shown: list[int] = []
            for column in columns:
                if shown and not fits(self._block([*shown, column], names, _NARROW)):
                    yield self._block(shown, names, _NARROW)
                    shown = []
                shown.append(column)
            yield self._block(shown, names, _NARROW)
        yield from (_text(f"bold: {note}" if isinstance(note, Bold) else note) for note in self.table.notes)

    def _block(self, columns: Sequence[int], names: int, widest: int) -> RichTable:
        """These columns, without empty rows. names, widest: characters of all names together, and of a column."""
        table, block = self.table, RichTable(show_header=any(self.table.heads))
        widths = [max(len(row[index]) for row in (table.heads, *table.rows)) for index in range(table.names)]
        longest = max([8, *widths])
        while longest > 8 and sum(min(width, longest) for width in widths) > names:
            longest -= 1
        for index in (*range(table.names), *columns):
            words = index < table.names and not all(row[index].replace(",", "").isdigit() for row in table.rows)
            block.add_column(
                _text(table.heads[index]),
                justify="left" if words else "right",
                overflow="fold",
                max_width=longest if index < table.names else widest,
            )
        for number, row in enumerate(table.rows):
            if number in table.sections:
                block.add_section()
            if any(row[index] for index in columns) or not columns:
                block.add_row(*map(_text, row[: table.names]), *(_text(row[index]) for index in columns))
        return block


def _text(cell: str) -> Text:
    return Text(clean(cell, LONGEST_TEXT), "bold" if isinstance(cell, Bold) else "")


def _bounded(message: str) -> str:
    """The message without the middle of long lines and lists: values from the user or a file can be of any length."""
    lines = [shortened(line) for line in message.split("\n")]
    return "\n".join(lines if len(lines) <= _MESSAGE_LINES else [*lines[: _MESSAGE_LINES - 2], "  ...", lines[-1]])


def print_json(value: Any) -> None:
    """Print JSON on standard output, with null for infinities and NaN."""
    if not out.quiet:
        out.file.write(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")


def show_changes(file: str, changes: Iterable[tuple[str, Any, Any]]) -> None:
    """Print the changes of a JSON file: (path, before, after) of each value."""
    out.print(f"Changes to {file}:")
    for path, before, after in changes:
        out.print(f"  {path}", markup=False)
        out.print(f"    [red]- {_json(before)}[/]\n    [green]+ {_json(after)}[/]", soft_wrap=True)


def _json(value: Any) -> str:
    return escape(value if value == ABSENT else json.dumps(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Handler(logging.Handler):
    """Prints log records of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            warn(record.getMessage())
        elif spans := getattr(record, "spans", None):
            show_spans(err, spans)
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
        tell(description + (f" 0/{total}" if total else ""), err)

    def __call__(self, *, done: int | None = None, text: str | None = None, phase: str | None = None) -> None:
        if phase is not None:
            self.description, self.started, self.first = phase, time.monotonic(), None
            tell(phase, err)
            return
        self.done = self.done + 1 if done is None else done
        if self.first is None:
            self.first = self.done - 1  # a resumed run does not start at 0
        now = time.monotonic()
        if now - self.printed >= _SECONDS:
            self.printed = now
            tell(self._line(text, now - self.started), err)

    def _line(self, text: str | None, elapsed: float) -> str:
        if not self.total:
            return f"{self.description} {self.done}, {duration(elapsed)}"
        left = elapsed * (self.total - self.done) / (self.done - (self.first or 0))
        detail = f", {text}" if text else ""
        return f"{self.description} {self.done}/{self.total}{detail}, {duration(left)} left"
