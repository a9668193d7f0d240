"""A table of text, for the terminal, the HTML page and the model card."""

from collections.abc import Sequence
from dataclasses import dataclass, replace


class Bold(str):
    """A cell to emphasize."""


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
