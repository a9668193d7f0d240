"""Results as tables for the terminal. Names are shown as they are, but for what would command a terminal."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ropecli.evaluation.eval_report import EvalReport, RetrievalReport
from ropecli.reporting import cells
from ropecli.reporting.wording import HEADLINES_NOTE, clean, headline_sentence, protocol_name
from ropecli.tuning.tune_report import TRAINING, TuneReport

_UNBOUNDED = 10**4


class FittingTable:
    """A table whose columns stand in as many blocks below each other as the terminal's width asks for.

    names: heads of the columns that every block has. columns: heads of the others. rows: a cell for each of all these.
    sections: indices of the rows before which a line stands. justify: of the names.
    """

    def __init__(
        self,
        names: Sequence[str],
        columns: Sequence[str],
        rows: Sequence[Sequence[str | Text]],
        sections: Collection[int] = (),
        justify: Literal["left", "right"] = "left",
    ) -> None:
        self.names, self.columns, self.rows, self.sections, self.justify = names, columns, rows, sections, justify

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        def fits(columns: Sequence[int], names: int) -> bool:
            table = self._table(columns, names)
            return Measurement.get(console, options.update(max_width=_UNBOUNDED), table).maximum <= options.max_width

        everything = range(len(self.columns))
        if not everything or fits(everything, _UNBOUNDED):
            yield self._table(everything, _UNBOUNDED)
            return
        names, block = options.max_width * 11 // 20, [0]
        for column in everything[1:]:
            if not fits([*block, column], names):
                yield self._table(block, names)
                block = []
            block.append(column)
        yield self._table(block, names)

    def _table(self, columns: Sequence[int], width: int) -> Table:
        """Of some of the columns, by index, beside names of up to `width` letters; without rows that say nothing."""
        table, count = Table(), len(self.names)
        for head in self.names:
            table.add_column(head, justify=self.justify, overflow="fold", max_width=max(8, width // count))
        for column in columns:
            table.add_column(self.columns[column], justify="right", overflow="fold")
        for index, row in enumerate(self.rows):
            if index in self.sections:
                table.add_section()
            cells = [row[count + column] for column in columns]
            if any(map(str, cells)) or not cells:
                table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in (*row[:count], *cells)))
        return table


def _numbers(table: cells.TextTable) -> FittingTable:
    return FittingTable(table.heads[:1], table.heads[1:], table.rows, justify="right")


def perplexity_table(report: EvalReport, *, verbose: bool = True) -> Group:
    """A row per length, with the baseline's perplexity, and below it cost and gain. verbose: all columns."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    title = f"{clean(report.checkpoint)}{patched}: perplexity by length, protocol {protocol_name(report)}, "
    title += f"data {clean(report.source)}"
    measured = cells.measured_rows(report)
    if not verbose:
        measured = measured.only("length", "ppl", "baseline ppl", "95% interval", "bits/byte", "documents")
    below = []
    if report.baseline is not None:
        base = report.baseline
        below.append(Text(f"baseline: {clean(base.checkpoint)}, {clean(base.label)}"))
        below += [Text(headline_sentence(headline)) for headline in report.headlines]
        below += [Text(HEADLINES_NOTE, "dim")] if report.headlines else []
    return Group(Text(title), _numbers(measured), *below)


def comparison_table(reports: Sequence[EvalReport]) -> Group:
    """A line a method, a column a length; bold: the best of each column, among those of the same tokens and protocol.

    Lines say their checkpoint, protocol and data where these are not the same for all.
    """
    comparison = cells.compare(reports)

    rows: list[list[str | Text]] = [
        [*line.names, *(Text(number, "bold" if best else "") for number, best in line.cells)]
        for line in comparison.lines
    ]
    sections = [index for index, line in enumerate(comparison.lines) if line.section]
    fitting = FittingTable(comparison.heads, [f"{length}" for length in comparison.lengths], rows, sections)
    return Group(Text(comparison.title), fitting, *map(Text, comparison.notes))


def retrieval_tables(report: RetrievalReport, *, verbose: bool = True) -> Group:
    """Keys found, percent, by depth and length, and summed by length. verbose: all columns."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    asked = "ranked among candidates" if report.mode == "rank" else "generated"
    title = (
        f"{clean(report.checkpoint)}{patched}: {clean(report.task)}, {asked}, data {clean(report.source)}; "
        f"a guess finds {100 * report.chance:.3g}%, pretraining length {report.original_max_position_embeddings}"
    )
    found = cells.pivot(report)
    heads = ["depth", *(f"{length}" for length in found.lengths)]
    rows = [
        [name, *("–" if cell is None else f"{100 * cell.accuracy:.0f}" for cell in own)] for name, own in found.rows
    ]
    note = Text("keys found, percent", "italic")
    summary = cells.length_summary(report)
    if not verbose:
        summary = summary.only("length", "found", "95% (Wilson)", "prompts", "pretraining length")
    return Group(Text(title), note, _numbers(cells.TextTable(heads, rows)), _numbers(summary))


def tuning_table(report: TuneReport) -> Group:
    """A line each: the model as pretrained, by the plain method, by the best constants, and as it was tuned."""
    states = cells.tuning_states(report)
    shown = [index for index, head in enumerate(states.heads) if head != "documents"]  # the title has it
    table = Table()
    for index in shown:
        table.add_column(states.heads[index], justify="right" if index else "left")
    for row in states.rows:
        table.add_row(*(Text(row[index]) for index in shown))
    title = (
        f"{clean(report.checkpoint)}: the last {report.settings['targets']} tokens of the {report.score.documents} "
        f"documents of {clean(report.source)} that the tuning was judged by"
    )
    return Group(Text(title), table, *map(Text, _tuning_notes(report)))


def _tuning_notes(report: TuneReport) -> list[str]:
    if report.level not in TRAINING:
        return []
    if not report.step:
        return [f"{report.level} found nothing better than the best constants: these alone are written."]
    return [f"Rounded to the dtype of the weights' files, logits move by {report.rounding:.1g} of the largest."]
