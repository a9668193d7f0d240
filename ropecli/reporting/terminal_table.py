"""Prints a Table in the terminal."""

from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from ropecli.table import LONGEST_TEXT, Bold, Table, clean

_UNBOUNDED = 10**4
_NARROW_HEAD = 16
"""Characters of a head before it is folded, if space is short."""


class TerminalTable:
    """A Table for rich, with its title and notes.

    If the terminal is too narrow, the columns are split into several blocks, and each repeats the names.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        def fits(columns: Sequence[int], names: int, head: int) -> bool:
            width = Measurement.get(console, options.update(max_width=_UNBOUNDED), self._block(columns, names, head))
            return width.maximum <= options.max_width

        columns = range(self.table.names, len(self.table.heads))
        if self.table.title:
            yield _text(self.table.title)
        if not columns or fits(columns, _UNBOUNDED, _UNBOUNDED):
            yield self._block(columns, _UNBOUNDED, _UNBOUNDED)
        else:
            narrow = options.max_width * 9 // 20, _NARROW_HEAD
            block = [columns[0]]
            for column in columns[1:]:
                if not fits([*block, column], *narrow):
                    yield self._block(block, *narrow)
                    block = []
                block.append(column)
            yield self._block(block, *narrow)
        yield from map(_text, self.table.notes)

    def _block(self, columns: Sequence[int], names: int, head: int) -> RichTable:
        """These columns, without empty rows. names, head: maximum characters of all names together, and of a head."""
        table = self.table
        block, shown = RichTable(show_header=any(table.heads)), [*range(table.names), *columns]
        widths = [max(len(row[index]) for row in (table.heads, *table.rows)) for index in range(table.names)]
        longest = max([8, *widths])
        while longest > 8 and sum(min(width, longest) for width in widths) > names:
            longest -= 1
        for index in shown:
            cells = [row[index] for row in table.rows]
            words = index < table.names and not all(cell.replace(",", "").isdigit() for cell in cells)
            width = longest if index < table.names else max(head, *map(len, cells))
            justify: Literal["left", "right"] = "left" if words else "right"
            block.add_column(_text(table.heads[index]), justify=justify, overflow="fold", max_width=width)
        for number, row in enumerate(table.rows):
            if number in table.sections:
                block.add_section()
            if any(row[index] for index in columns) or not columns:
                block.add_row(*(_text(row[index]) for index in shown))
        return block


def _text(cell: str) -> Text:
    return Text(clean(cell, LONGEST_TEXT), "bold" if isinstance(cell, Bold) else "")
