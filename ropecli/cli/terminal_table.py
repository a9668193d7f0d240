"""A table on a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from ropecli.errors import shortened
from ropecli.table import LONGEST_TEXT, Bold, Table, clean

_UNBOUNDED = 10**4
_NARROW = 18
"""Characters of a column before it is folded, if space is short."""


class TerminalTable:
    """A Table for rich, with its title and notes.

    If the terminal is too narrow, the columns are split into several blocks, and each repeats the names.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        def fits(block: RichTable) -> bool:
            width = Measurement.get(console, options.update(max_width=_UNBOUNDED), block)
            return width.maximum <= options.max_width

        if self.table.title:
            yield _text(self.table.title)
        columns = range(self.table.names, len(self.table.heads))
        unfolded, names = self._block(columns, _UNBOUNDED, _UNBOUNDED), options.max_width * 9 // 20
        if not columns or fits(unfolded):
            yield unfolded
        else:
            shown: list[int] = []
            for column in columns:
                if shown and not fits(self._block([*shown, column], names, _NARROW)):
                    yield self._block(shown, names, _NARROW)
                    shown = []
                shown.append(column)
            yield self._block(shown, names, _NARROW)
        yield from (_text(f"bold: {note}" if isinstance(note, Bold) else note) for note in self.table.notes)

    def _block(self, columns: Sequence[int], names: int, widest: int) -> RichTable:
        """These columns, without empty rows. names, widest: characters of all names together, and of a column."""
        table, block = self.table, RichTable(show_header=any(self.table.heads))
        widths = [max(len(row[index]) for row in (table.heads, *table.rows)) for index in range(table.names)]
        longest = max([8, *widths])
        while longest > 8 and sum(min(width, longest) for width in widths) > names:
            longest -= 1
        for index in (*range(table.names), *columns):
            words = index < table.names and not all(row[index].replace(",", "").isdigit() for row in table.rows)
            block.add_column(
                _text(table.heads[index]),
                justify="left" if words else "right",
                overflow="fold",
                max_width=longest if index < table.names else widest,
            )
        for number, row in enumerate(table.rows):
            if number in table.sections:
                block.add_section()
            if any(row[index] for index in columns) or not columns:
                names_of_row = [_fitted(cell, longest) for cell in row[: table.names]]
                block.add_row(*names_of_row, *(_text(row[index]) for index in columns))
        return block


def _text(cell: str) -> Text:
    return Text(clean(cell, LONGEST_TEXT), "bold" if isinstance(cell, Bold) else "")


def _fitted(name: str, longest: int) -> Text:
    """A name of words is folded at spaces; any other, such as a path, loses its middle."""
    text = _text(name)
    return text if " " in name else Text(shortened(text.plain, longest), text.style)
