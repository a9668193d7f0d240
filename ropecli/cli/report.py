"""Renders `ropecli report` and `ropecli plot`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import tell

if TYPE_CHECKING:
    from ropecli.commands.report import DrawnFile


def render(drawn: "DrawnFile") -> None:
    tell(f"{drawn.kind}: {drawn.path}")
