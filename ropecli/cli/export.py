"""Renders `ropecli export`: the command alone on standard output, to be pasted."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import err, tell, warn

if TYPE_CHECKING:
    from ropecli.engines.engine_export import Export


def render(export: "Export") -> None:
    tell(export.command)
    for sentence in export.cannot:
        warn(sentence)
    for sentence in export.notes:
        err.print(f"note: {sentence}", markup=False, soft_wrap=True)
