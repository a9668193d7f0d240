"""The pairs by how often they turn in the pretraining window, and what each method makes of their frequencies.

The borders are YaRN's: 32 and 1 are its beta_fast and beta_slow (arXiv:2309.00071, section 3.2).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ropecli.report.fitting import Fitting, add_names
from ropecli.report.wording import clean, tokens

_BANDS = {"32 or more": (32, math.inf), "8 to 32": (8, 32), "1 to 8": (1, 8), "below 1": (0, 1)}
_SAME = 1e-9


def bands_table(ropes: Sequence[dict[str, Any]]) -> list[RenderableType]:
    """ropes: the pretrained one first. Methods that change no frequency have no column."""
    pretrained, *methods = ropes
    methods = [rope for rope in methods if any(abs(one - 1) > _SAME for one in _known(rope))]
    rows = [
        (band, pairs)
        for band, (low, high) in _BANDS.items()
        if (pairs := [pair for pair, turns in enumerate(pretrained["turns_in_window"]) if low <= turns < high])
    ]

    def table(columns: Sequence[int], names: int) -> Table:
        table = Table()
        add_names(table, ["turns r", "pairs", "wavelength, tokens"], names)
        for column in columns:
            table.add_column(clean(methods[column]["name"]), justify="right", overflow="fold")
        for band, pairs in rows:
            wavelengths = _tokens_between([pretrained["wavelength"][pair] for pair in pairs])
            cells = [_between([_known(methods[column])[pair] for pair in pairs]) for column in columns]
            table.add_row(band, _range(pairs), wavelengths, *map(Text, cells))
        return table

    title = "pairs by their turns in the pretraining window, r = L/λ"
    if methods:
        return [Text(f"\n{title}; by method, their frequency over the pretrained one"), Fitting(len(methods), table)]
    return [Text(f"\n{title}"), table([], 10**4)]


def _known(rope: dict[str, Any]) -> list[float]:
    """The frequency of each pair over the pretrained one; of one that stands still before and after, 1."""
    return [1.0 if math.isnan(one) else one for one in rope["frequency_over_pretrained"]]


def _tokens_between(values: Sequence[float]) -> str:
    ends = [tokens(value) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def _between(values: Iterable[float]) -> str:
    """From the first pair to the last one."""
    ends = [f"{value:.3g}" for value in values]
    return " to ".join(dict.fromkeys([ends[0], ends[-1]]))


def _range(pairs: Sequence[int]) -> str:
    return f"{pairs[0]}" if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
