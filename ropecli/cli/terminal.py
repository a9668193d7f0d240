"""Console output: results on standard output, everything else on standard error."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ropecli.config.changes import ABSENT
from ropecli.errors import MethodError, shortened, shown
from ropecli.launch import read_launch
from ropecli.messages import Span, plain_text
from ropecli.yaml12 import read_yaml, token_count

if TYPE_CHECKING:
    from ropecli.table import Table

# Control characters in names or configs from strangers must not reach the terminal.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}

_MESSAGE_LINES = 20
"""Lines of one message."""


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
    later = shared and read_launch().rank > 0
    out.quiet, err.quiet = later, later or quiet
    out.verbose, err.as_json = verbose, as_json


def fail(message: str) -> None:
    err.quiet = False  # quiet processes still print why they end
    if err.as_json:
        err.file.write(json.dumps({"error": message}) + "\n")
        return
    err.print("[bold red]error:[/]", end=" ")
    err.print(_bounded(message), markup=False, soft_wrap=True)


def tell(text: str) -> None:
    """Print a line of the result."""
    out.print(text, markup=False, soft_wrap=True)


def show_tables(tables: "Iterable[Table]") -> None:
    """Print tables, each after an empty line but the first."""
    from ropecli.reporting.terminal_table import TerminalTable

    for number, table in enumerate(tables):
        out.print(*[""] * bool(number), TerminalTable(table), sep="\n")


def show_spans(console: Console, spans: Sequence[Span]) -> None:
    """Print a training sequence: what is trained on is green, or in double brackets where there is no colour."""
    if console.color_system is None:
        console.print(plain_text(spans).translate(_CONTROLS), markup=False, soft_wrap=True)
        return
    text = Text()
    for part, is_trained in spans:
        if is_trained is None:
            text.append(f"\n--- {part} ---\n", "dim")
        else:
            text.append(part.translate(_CONTROLS), "green" if is_trained else "")
    console.print(text, soft_wrap=True)


def warn(message: str) -> None:
    err.print("[yellow]warning:[/]", end=" ")
    err.print(_bounded(message), markup=False, soft_wrap=True)


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


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Parse `--set KEY=VALUE` options, with values in YAML 1.2. Raises MethodError."""
    params = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not (equals and key.strip()):
            raise MethodError(f"--set {setting!r} is not KEY=VALUE.")
        if key.strip() in params:
            raise MethodError(f"--set {key.strip()} was given twice.")
        try:
            params[key.strip()] = read_yaml(value)
        except ValueError:
            params[key.strip()] = value
    return params


def parse_list(text: str, option: str, kind: type) -> list[Any]:
    """Parse `256,4k,1M` as token counts, `0,0.5` as floats, names as strings. Raises MethodError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return [kind(token_count(part) if kind is int else part) for part in parts]
    except ValueError:
        example = "256,4k" if kind is int else "1,2.5"
        raise MethodError(f"{option} is {shown(text)}; expected numbers separated by commas: {example}.") from None


def parse_tokens(text: str, option: str) -> int:
    """Parse `512`, `4k` or `1M`. Raises MethodError."""
    count = token_count(text)
    if not isinstance(count, int):
        raise MethodError(f"{option} is {shown(text)}; expected a number of tokens, such as 512, 4k or 1M.")
    return count


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
