"""A table on a terminal."""

from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from ropecli.table import LONGEST_TEXT, Bold, Table, clean


def terminal_table(table: Table) -> Group:
    """The title, the rows and the notes. On a narrow terminal cells are folded."""
    grid = RichTable(show_header=any(table.heads))
    for index, head in enumerate(table.heads):
        grid.add_column(_text(head), justify="left" if index < table.names else "right", overflow="fold")
    for number, row in enumerate(table.rows):
        if number in table.sections:
            grid.add_section()
        grid.add_row(*map(_text, row))
    title = [_text(table.title)] if table.title else []
    return Group(*title, grid, *(_text(f"bold: {note}" if isinstance(note, Bold) else note) for note in table.notes))


def _text(cell: str) -> Text:
    return Text(clean(cell, LONGEST_TEXT), "bold" if isinstance(cell, Bold) else "")
