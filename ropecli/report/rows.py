"""A Row's columns as every table shows them: one list, for the terminal and for the page."""

from collections.abc import Callable
from dataclasses import dataclass

from ropecli.evaluate.report import EvalReport
from ropecli.evaluate.tally import Row
from ropecli.report.wording import duration, number, size


@dataclass(frozen=True)
class Column:
    """name: with the unit. of: the cell."""

    name: str
    of: Callable[[Row], str]


def interval(row: Row) -> str:
    if row.ppl_low is None or row.ppl_high is None:
        return "one document"
    return f"{number(row.ppl_low)} to {number(row.ppl_high)}"


_COLUMNS = (
    Column("length", lambda row: f"{row.length}"),
    Column("ppl", lambda row: number(row.ppl)),
    Column("95% interval", interval),
    Column("nll (nats)", lambda row: f"{row.nll:.4f}"),
    Column("bits/byte", lambda row: "unknown" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}"),
    Column("tokens", lambda row: f"{row.tokens}"),
    Column("documents", lambda row: f"{row.documents}"),
    Column("time", lambda row: duration(row.seconds)),
    Column("tokens/s", lambda row: f"{row.tokens_per_second:.0f}"),
    Column("peak memory", lambda row: size(row.peak_memory)),
)


def columns_of(report: EvalReport) -> list[Column]:
    """With the baseline's perplexity beside the report's own, where there is one."""
    columns = list(_COLUMNS)
    if report.baseline is not None:
        theirs = {row.length: number(row.ppl) for row in report.baseline.rows}
        columns.insert(2, Column("baseline ppl", lambda row: theirs.get(row.length, "–")))
    return columns
