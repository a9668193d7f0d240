"""Results as tables for the terminal."""

from collections.abc import Sequence

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ropecli.evaluate.report import EvalReport


def perplexity_table(report: EvalReport) -> Group:
    patched = f", {report.label} in memory" if report.in_memory else ""
    title = f"{report.checkpoint}{patched}: perplexity by length, protocol {report.protocol}, data {report.source}"
    table = Table()
    for name in ("length", "ppl", "95% interval", "nll (nats)", "tokens", "documents"):
        table.add_column(name, justify="right")
    for row in report.rows:
        interval = "one document" if row.ppl_low is None else f"{row.ppl_low:.2f} to {row.ppl_high:.2f}"
        table.add_row(
            f"{row.length}", f"{row.ppl:.2f}", interval, f"{row.nll:.4f}", f"{row.tokens}", f"{row.documents}"
        )
    return Group(Text(title), table)


def comparison_table(reports: Sequence[EvalReport]) -> Group:
    """A line a method, a column a length; the best of each column in bold."""
    first = reports[0]
    title = f"{first.checkpoint}: perplexity by method and length, protocol {first.protocol}, data {first.source}"
    table = Table()
    table.add_column("method")
    for row in first.rows:
        table.add_column(f"{row.length}", justify="right")
    best = [min(report.rows[index].ppl for report in reports) for index in range(len(first.rows))]
    for report in reports:
        cells = [
            f"[bold]{row.ppl:.2f}[/]" if row.ppl == best[i] else f"{row.ppl:.2f}" for i, row in enumerate(report.rows)
        ]
        table.add_row(escape(report.label), *cells)
    return Group(Text(title), table)
