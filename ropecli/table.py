"""A table of text: for a terminal and the HTML page, and in Markdown for files, pipes and the model card.

The renderers clean every cell, so a table may hold names from strangers as they are.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ropecli.errors import shortened


class Bold(str):
    """A cell to emphasize; or a note that says what is emphasized."""


@dataclass(frozen=True)
class Table:
    """rows: one cell per head. notes: sentences below the table.

    names: number of columns that name the row; the others hold numbers. sections: indices of rows that start a section.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    names: int = 1
    sections: frozenset[int] = frozenset()

    def only(self, *heads: str) -> "Table":
        """Keep only these columns."""
        kept = [index for index, head in enumerate(self.heads) if head in heads]
        return replace(
            self,
            heads=[self.heads[index] for index in kept],
            rows=[[row[index] for index in kept] for row in self.rows],
            names=sum(index < self.names for index in kept),
        )


LONGEST_NAME, LONGEST_TEXT = 80, 10_000
"""Characters of a name, and of anything else."""
_FORGED = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029\ufffe\uffff")
"""Characters that change text direction, end a line, or are invalid in XML."""


def clean(text: str, longest: int = LONGEST_NAME) -> str:
    """Shorten to `longest` characters, and replace control characters."""
    text = shortened(text, longest)
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_forged(character) else character for character in text)


def _is_forged(character: str) -> bool:
    return character in _FORGED or unicodedata.category(character) in ("Cc", "Cs")


def markdown(table: Table) -> str:
    """The title as a heading, the rows, with a star after emphasized cells, and the notes as a list."""
    heads, *rows = ([escaped(cell) for cell in cells] for cells in (table.heads, *table.rows))
    rule = ["---"] * table.names + ["---:"] * (len(heads) - table.names)
    lines = "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))
    title, star = f"### {escaped(table.title)}" * bool(table.title), r"\*: "
    notes = [f"- {star * isinstance(note, Bold)}{escaped(str(note))}" for note in table.notes]
    return "\n\n".join(filter(None, [title, lines, "\n".join(notes)]))


def escaped(value: object) -> str:
    """A value in Markdown text or in a cell of a table."""
    text = re.sub(r"([\\`*|<\[\]])", r"\\\1", clean(str(value), LONGEST_TEXT))
    return f"{text}*" if isinstance(value, Bold) else text
