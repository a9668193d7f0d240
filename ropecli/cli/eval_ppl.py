"""Renders `ropecli eval-ppl`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import out

if TYPE_CHECKING:
    from ropecli.evaluation.eval_report import EvalReport


def render(report: "EvalReport") -> None:
    from ropecli.reporting.tables import perplexity_table

    out.print(perplexity_table(report))
