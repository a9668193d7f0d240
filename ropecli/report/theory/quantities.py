"""The quantities of every rope side by side, and the methods in YaRN's general form f(x, g(m), h(θ_d)) (eq. 12)."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ropecli.report.fitting import Fitting, add_names
from ropecli.report.wording import clean, tokens
from ropecli.theory.score import LONGEST

Rope = dict[str, Any]


def forms_table(ropes: Sequence[Rope]) -> list[RenderableType]:
    """What each method makes of a position m and of a pair's frequency θ_d."""
    table = Table()
    table.add_column(overflow="fold")
    table.add_column("g(m)", no_wrap=True)
    table.add_column("h(θ_d)", overflow="fold")
    table.add_column("interpolation", no_wrap=True)
    for rope in ropes:
        # what remaps distances has neither
        h = rope["h"] if rope["g"] else "as it was: distances change, frequencies do not"
        cells = (clean(rope["name"]), rope["g"], h, rope["interpolation"])
        table.add_row(*map(Text, cells))
    return [Text("what becomes of a position m and of a pair's frequency θ_d: f(x, g(m), h(θ_d))"), table]


def quantities_table(ropes: Sequence[Rope]) -> Fitting:
    """A column for each rope; rows that say nothing of any beside each other are left out."""

    def table(columns: Sequence[int], names: int) -> Table:
        table = Table()
        add_names(table, [""], names)
        for column in columns:
            table.add_column(clean(ropes[column]["name"]), justify="right", overflow="fold")
        for rows in _ROWS:
            table.add_section()
            for name, show in rows:
                if any(show(ropes[column]) for column in columns):
                    table.add_row(name, *(Text(show(ropes[column])) for column in columns))
        return table

    return Fitting(len(ropes), table)


def _tokens(key: str) -> Callable[[Rope], str]:
    return lambda rope: tokens(rope[key])


def _digits(key: str, digits: int = 4) -> Callable[[Rope], str]:
    return lambda rope: "" if rope[key] is None or math.isnan(rope[key]) else f"{rope[key]:.{digits}g}"


def _looked_for(key: str) -> Callable[[Rope], str]:
    return lambda rope: f"none by {LONGEST:,}" if rope[key] is None else tokens(rope[key])


def _base(rope: Rope) -> str:
    theta = rope["rope_theta"]
    return f"{theta:,.0f}" if theta >= 1e4 or theta == int(theta) else f"{theta:,.6g}"


def _farthest(rope: Rope) -> str:
    """Where it is not the target's last token."""
    return tokens(rope["largest_distance"]) if rope["largest_distance"] != rope["target_length"] - 1 else ""


def _share(rope: Rope) -> str:
    share = rope["share_turned_in_effective_range"]
    return "" if math.isnan(share) else f"{share:.0%}"


def _unique(rope: Rope) -> str:
    return {True: "yes", False: "no", None: ""}[rope["unique_by_slowest_pair"]]


_ROWS: tuple[tuple[tuple[str, Callable[[Rope], str]], ...], ...] = (
    (
        ("factor s", _digits("factor", 6)),
        ("largest distance seen, tokens", _farthest),
        ("attention factor", _digits("attention_factor", 6)),
        ("base b (rope_theta)", _base),
    ),
    (
        ("longest wavelength, tokens", _tokens("longest_wavelength")),
        ("half wavelength, tokens", _tokens("half_wavelength")),
        ("effective range, tokens", _tokens("effective_range")),
        ("pairs turned by then", _share),
        ("slowest pair unique", _unique),
        ("critical dimension", lambda rope: f"{rope['critical_dimension']} of {rope['rotary_dim']}"),
    ),
    (
        ("first rise of the score, tokens", _looked_for("first_rise")),
        ("first negative score, tokens", _looked_for("first_negative_score")),
    ),
    (
        ("granularity (mean sine)", _digits("granularity")),
        ("its limit α/ln b", _digits("granularity_limit")),
        ("its exact limit", _digits("granularity_exact_limit")),
        ("closest images q", _digits("closest_images")),
        ("their gap, tokens", _tokens("closest_images_gap")),
        ("distance d to old images", _digits("distance_to_old_images")),
        ("float32 angle error, rad", _digits("float32_angle_error", 2)),
    ),
)
