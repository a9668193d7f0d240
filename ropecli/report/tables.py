"""Results as tables for the terminal. Names are shown as they are, but for what would command a terminal."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ropecli.evaluate.report import EvalReport, RetrievalReport
from ropecli.report import cells
from ropecli.report.wording import HEADLINES_NOTE, clean, headline_sentence, protocol_name
from ropecli.tune.record import TRAINING, TuneReport

_UNBOUNDED = 10**4


class Fitting:
    """A table whose columns stand in as many blocks below each other as the terminal's width asks for.

    table: of some of `count` columns, by index, beside the names, which are no wider than its second argument.
    """

    def __init__(self, count: int, table: Callable[[Sequence[int], int], Table]) -> None:
        self.count, self.table = count, table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        def fits(columns: Sequence[int], names: int) -> bool:
            table = self.table(columns, names)
            return Measurement.get(console, options.update(max_width=_UNBOUNDED), table).maximum <= options.max_width

        everything = range(self.count)
        if fits(everything, _UNBOUNDED):
            yield self.table(everything, _UNBOUNDED)
            return
        names, block = options.max_width * 11 // 20, [0]
        for column in everything[1:]:
            if not fits([*block, column], names):
                yield self.table(block, names)
                block = []
            block.append(column)
        yield self.table(block, names)


def add_names(table: Table, heads: Sequence[str], width: int) -> None:
    """Columns of names, which are wrapped where they are wider than `width` together."""
    for head in heads:
        table.add_column(head, overflow="fold", max_width=max(8, width // len(heads)))


def _numbers(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Fitting:
    """A line a row, its first cell in every block."""

    def table(columns: Sequence[int], names: int) -> Table:
        table = Table()
        for head in (heads[0], *(heads[column + 1] for column in columns)):
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell) for cell in (row[0], *(row[column + 1] for column in columns))))
        return table

    return Fitting(len(heads) - 1, table)


def perplexity_table(report: EvalReport) -> Group:
    """A line a length; the baseline beside it, and below what follows from the two."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    title = f"{clean(report.checkpoint)}{patched}: perplexity by length, protocol {protocol_name(report)}, "
    title += f"data {clean(report.source)}"
    measured = cells.measured_rows(report)
    below = []
    if report.baseline is not None:
        base = report.baseline
        below.append(Text(f"baseline: {clean(base.checkpoint)}, {clean(base.label)}"))
        below += [Text(headline_sentence(headline)) for headline in report.headlines]
        below += [Text(HEADLINES_NOTE, "dim")] if report.headlines else []
    return Group(Text(title), _numbers(measured.heads, measured.rows), *below)


def comparison_table(reports: Sequence[EvalReport]) -> Group:
    """A line a method, a column a length; bold: the best of each column, among those of the same tokens and protocol.

    Lines say their checkpoint, protocol and data where these are not the same for all.
    """
    comparison = cells.compare(reports)

    def table(columns: Sequence[int], names: int) -> Table:
        table = Table()
        add_names(table, comparison.heads, names)
        for column in columns:
            table.add_column(f"{comparison.lengths[column]}", justify="right", no_wrap=True)
        for line in comparison.lines:
            if line.section:
                table.add_section()
            numbers = [Text(number, "bold" if best else "") for number, best in (line.cells[at] for at in columns)]
            table.add_row(*map(Text, line.names), *numbers)
        return table

    fitting = Fitting(len(comparison.lengths), table)
    return Group(Text(comparison.title), fitting, *map(Text, comparison.notes))


def retrieval_tables(report: RetrievalReport) -> Group:
    """Keys found, percent, by depth and length; and in sum by length."""
    patched = f", {clean(report.label)} in memory" if report.in_memory else ""
    asked = "ranked among candidates" if report.mode == "rank" else "generated"
    title = (
        f"{clean(report.checkpoint)}{patched}: {clean(report.task)}, {asked}, data {clean(report.source)}; "
        f"a guess finds {100 * report.chance:.3g}%, window {report.original_max_position_embeddings}"
    )
    found = cells.pivot(report)
    heads = ["depth", *(f"{length}" for length in found.lengths)]
    rows = [
        [name, *("–" if cell is None else f"{100 * cell.accuracy:.0f}" for cell in own)] for name, own in found.rows
    ]
    summary = cells.length_summary(report)
    note = Text("keys found, percent", "italic")
    return Group(Text(title), note, _numbers(heads, rows), _numbers(summary.heads, summary.rows))


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
