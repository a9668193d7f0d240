"""Renders `ropecli passkey` and `ropecli needle`."""

from typing import TYPE_CHECKING

from ropecli.cli.terminal import out

if TYPE_CHECKING:
    from ropecli.evaluation.eval_report import RetrievalReport


def render(report: "RetrievalReport") -> None:
    from ropecli.reporting.tables import retrieval_tables

    out.print(retrieval_tables(report))
