"""Renders `ropecli theory`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import out

if TYPE_CHECKING:
    from ropecli.commands.theory import Theory


def render(theory: "Theory") -> None:
    from ropecli.reporting.theory_tables import theory_tables

    out.print(theory_tables(theory.report))
