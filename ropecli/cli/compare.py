"""Renders `ropecli compare`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import out, tell

if TYPE_CHECKING:
    from ropecli.commands.compare import Comparison


def render(comparison: "Comparison") -> None:
    from ropecli.reporting.tables import comparison_table

    out.print(comparison_table(comparison.reports))
    if comparison.plot:
        tell(f"plot: {comparison.plot}")
