"""Options that several commands share, word for word."""

from typing import Annotated

import typer

Checkpoint = Annotated[str, typer.Argument(help="A folder, a Hub id (owner/name), or 'demo'.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Of a Hub id: a branch, a tag or a commit.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
