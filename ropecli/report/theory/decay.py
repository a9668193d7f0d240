"""How the inner product of two unit vectors falls with distance, beside its estimates, for one rope."""

from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ropecli.report.wording import clean

_COLUMNS = {
    "score": "score",
    "magnitude": "|mean|",
    "estimate": "integral",
    "bound": "O(1/t)",
    "sinusoidal": "sinusoidal",
}


def decay_table(rope: dict[str, Any]) -> list[RenderableType]:
    """Without the columns that mean nothing for its frequencies: the bound is one of powers of a base.

    Nothing at a target of one token.
    """
    rows = rope["decay"]
    if not rows:
        return []
    shown = {key: name for key, name in _COLUMNS.items() if any(row[key] is not None for row in rows)}
    table = Table()
    for name in ("distance", *shown.values()):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(f"{row['distance']:,}", *("" if row[key] is None else f"{row[key]:.3f}" for key in shown))
    title = f"\n{clean(rope['name'])}: inner product of a query and a key, both of ones and of length 1"
    bound = ", O(1/t) its bound" if "bound" in shown else ""
    note = (
        f"|mean| is that of the complex rotations, whose real part is the score; integral, its estimate{bound}; "
        "sinusoidal, the same of sinusoidal embeddings of the pretrained base. Attention factors are left out."
    )
    return [Text(title), table, Text(note, "dim")]
