"""Results as tables for the terminal. Names are printed without control characters."""

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ropecli.evaluation.report import EvalReport, RetrievalReport, RulerReport
from ropecli.reporting import cells
from ropecli.reporting.wording import (
    HEADLINES_NOTE,
    clean,
    headline_sentence,
    protocol_name,
    ruler_mode,
    ruler_sentences,
)
from ropecli.tuning.tune_report import TRAINING, TuneReport

_UNBOUNDED = 10**4


class FittingTable:
    """A table that splits its columns into several blocks if the terminal is too narrow.

    names: heads of the columns that every block repeats. columns: heads of the others. rows: one cell per head of
    both. sections: indices of rows that start a section. justify: of the names.
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
        """A block with these columns, without empty rows. width: maximum characters of all names together."""
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
    """One row per length, with the baseline's perplexity; cost and gain below. verbose: show all columns."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    title = f"{clean(report.checkpoint)}{patched}: perplexity by length, protocol {protocol_name(report)}, "
    title += f"data {clean(report.source)}"
    measured = cells.measured_rows(report)
    if not verbose:
        few = ["tokens"] if report.protocol == "longppl" else []  # the number of key tokens
        measured = measured.only("length", "ppl", "baseline ppl", "95% interval", "bits/byte", *few, "documents")
    below = []
    if report.baseline is not None:
        base = report.baseline
        below.append(Text(f"baseline: {clean(base.checkpoint)}, {clean(base.label)}"))
        below += [Text(headline_sentence(headline)) for headline in report.headlines]
        below += [Text(HEADLINES_NOTE, "dim")] if report.headlines else []
    return Group(Text(title), _numbers(measured), *below)


def comparison_table(reports: Sequence[EvalReport]) -> Group:
    """One line per method, one column per length; bold: the best of each column with the same tokens and protocol.

    Checkpoint, protocol and data have columns if they differ.
    """
    comparison = cells.compare(reports)

    rows: list[list[str | Text]] = [
        [*line.names, *(Text(number, "bold" if best else "") for number, best in line.cells)]
        for line in comparison.lines
    ]
    sections = [index for index, line in enumerate(comparison.lines) if line.section]
    fitting = FittingTable(comparison.heads, [f"{length}" for length in comparison.lengths], rows, sections)
    return Group(Text(comparison.title), fitting, *map(Text, comparison.notes))


def measure_table(reports: Sequence[EvalReport | RulerReport]) -> Group:
    """One line per checkpoint and method, one column per measure at its longest length, with 95% intervals."""
    measured = cells.measures(reports)
    return Group(
        Text(measured.title),
        FittingTable(measured.heads[:2], measured.heads[2:], measured.rows),
        *map(Text, measured.notes),
    )


def retrieval_tables(report: RetrievalReport, *, verbose: bool = True) -> Group:
    """Percentage of keys found by depth and length, and totals by length. verbose: show all columns."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    asked = "ranked among candidates" if report.mode == "rank" else "generated"
    title = (
        f"{clean(report.checkpoint)}{patched}: {clean(report.task)}, {asked}, data {clean(report.source)}; "
        f"chance {100 * report.chance:.3g}%, pretraining length {report.original_max_position_embeddings}"
    )
    found = cells.pivot(report)
    heads = ["depth", *(f"{length}" for length in found.lengths)]
    rows = [
        [name, *("–" if cell is None else f"{100 * cell.accuracy:.0f}" for cell in own)] for name, own in found.rows
    ]
    note = Text("keys found (%)", "italic")
    summary = cells.length_summary(report)
    if not verbose:
        summary = summary.only("length", "found", "95% (Wilson)", "prompts", "pretraining length")
    return Group(Text(title), note, _numbers(cells.TextTable(heads, rows)), _numbers(summary))


def ruler_table(report: RulerReport) -> Group:
    """The effective length, and scores in percent by task and length."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    title = f"{clean(report.checkpoint)}{patched}: RULER, {ruler_mode(report)}, essay {clean(report.source)}"
    scores = cells.ruler_scores(report)
    return Group(Text(title), _numbers_by_name(scores), *map(Text, ruler_sentences(report)))


def _numbers_by_name(table: cells.TextTable) -> FittingTable:
    return FittingTable(table.heads[:1], table.heads[1:], table.rows, sections=[len(table.rows) - 2])


def tuning_table(report: TuneReport) -> Group:
    """Scores as pretrained, with default constants, with the best constants, and after tuning."""
    states = cells.tuning_states(report)
    shown = [index for index, head in enumerate(states.heads) if head != "documents"]  # the title has it
    table = Table()
    for index in shown:
        table.add_column(states.heads[index], justify="right" if index else "left")
    for row in states.rows:
        table.add_row(*(Text(row[index]) for index in shown))
    last = f"the last {report.settings['targets']} tokens of"
    others = {"needle": "keys hidden in", "longppl": f"key tokens at the target, {last}"}
    scored = others.get(report.settings.get("objective", "ppl"), last)
    title = (
        f"{clean(report.checkpoint)}: scores of {scored} {report.score.documents} calibration documents of "
        f"{clean(report.source)}"
    )
    return Group(Text(title), table, *map(Text, _tuning_notes(report)))


def _tuning_notes(report: TuneReport) -> list[str]:
    if report.level not in TRAINING:
        return []
    if not report.step:
        return [f"{report.level} did not improve on the best constants; only these are written."]
    return [
        f"Rounding the weights to their saved dtype changes the logits by {report.rounding:.1g} of the largest one."
    ]
