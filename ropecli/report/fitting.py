"""A table whose columns stand in as many blocks below each other as the terminal's width asks for: no number is cut."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table

_UNBOUNDED = 10**4


class Fitting:
    """table: of some of `count` columns, by index, beside the names, which are no wider than its second argument."""

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


def numbers_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Fitting:
    """A line a row, its first cell in every block."""

    def table(columns: Sequence[int], names: int) -> Table:
        table = Table()
        for head in (heads[0], *(heads[column + 1] for column in columns)):
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(row[0], *(row[column + 1] for column in columns))
        return table

    return Fitting(len(heads) - 1, table)


def add_names(table: Table, heads: Sequence[str], width: int) -> None:
    """Columns of names, which are wrapped where they are wider than `width` together."""
    for head in heads:
        table.add_column(head, overflow="fold", max_width=max(8, width // len(heads)))
