"""Options that several commands share, word for word, and what holds for the paths in all of them."""

import functools
import os.path
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Checkpoint = Annotated[str, typer.Argument(help="A folder, a Hub id (owner/name), or 'demo'.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Of a Hub id: a branch, a tag or a commit.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]


def expand_home(command: Callable[..., None]) -> Callable[..., None]:
    """The command with `~` expanded in every path it is given: no shell expands `--output=~/x`."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**{name: expanded(value) for name, value in values.items()})

    return run


def expanded(value: Any) -> Any:
    """A path, or a list of paths, with `~` expanded; any other value unchanged."""
    if isinstance(value, list):
        return [expanded(one) for one in value]
    # Path.expanduser raises for an unknown user; ~name is then the name of a file
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value  # noqa: PTH111
