"""Terminal output of `ropecli theory`: tables and sentences, from the report of checkpoint/inspection.py.

Methods are shown in YaRN's general form f(x, g(m), h(θ_d)) (arXiv:2309.00071, eq. 12). The band limits, 32 and 1
rotations, are its beta_fast and beta_slow (section 3.2).
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ropecli.analysis.score import LONGEST
from ropecli.reporting.tables import FittingTable
from ropecli.reporting.theory_sentences import Rope, theory_sentences
from ropecli.reporting.wording import clean, tokens

_BANDS = {"32 or more": (32, math.inf), "8 to 32": (8, 32), "1 to 8": (1, 8), "below 1": (0, 1)}
_SAME = 1e-9
_DECAY = {
    "score": "score",
    "magnitude": "|mean|",
    "estimate": "integral",
    "bound": "O(1/t)",
    "sinusoidal": "sinusoidal",
}


def theory_tables(report: dict[str, Any]) -> Group:
    """report: of study_report."""
    ropes = report["ropes"]
    layers = f" (layers of type {clean(ropes[0]['layer_type'])})" if ropes[0]["layer_type"] else ""
    original_length, target = report["original_max_position_embeddings"], report["target_length"]
    title = f"{clean(report['checkpoint'])}{layers}: pretraining length {original_length:,}, target {target:,} tokens"
    parts: list[RenderableType] = [Text(title, "bold")]
    if len(ropes) > 1:
        parts += _forms_table(ropes[1:])
    parts += [Text("\nquantities"), _quantities_table(ropes), *_bands_table(ropes), *_decay_table(ropes[-1])]
    for sentence in theory_sentences(report):
        parts += [Text(), Text(sentence)]
    return Group(*parts)


def _forms_table(ropes: Sequence[Rope]) -> list[RenderableType]:
    """How each method changes a position m and a pair's frequency θ_d."""
    table = Table()
    table.add_column(overflow="fold")
    table.add_column("g(m)", no_wrap=True)
    table.add_column("h(θ_d)", overflow="fold")
    table.add_column("interpolation", no_wrap=True)
    for rope in ropes:
        # distance methods have neither g nor h
        h = rope["h"] if rope["g"] else "unchanged: the method changes distances"
        cells = (clean(rope["name"]), rope["g"], h, rope["interpolation"])
        table.add_row(*map(Text, cells))
    return [Text("scaling of a position m and of a pair's frequency θ_d: f(x, g(m), h(θ_d))"), table]


def _quantities_table(ropes: Sequence[Rope]) -> FittingTable:
    """A column for each rope."""
    rows = [[name, *(show(rope) for rope in ropes)] for group in _ROWS for name, show in group]
    sections = list(accumulate(map(len, _ROWS[:-1])))
    return FittingTable([""], [clean(rope["name"]) for rope in ropes], rows, sections)


def _tokens(key: str) -> Callable[[Rope], str]:
    return lambda rope: tokens(rope[key])


def _digits(key: str, digits: int = 4) -> Callable[[Rope], str]:
    return lambda rope: "" if rope[key] is None or math.isnan(rope[key]) else f"{rope[key]:.{digits}g}"


def _found(key: str) -> Callable[[Rope], str]:
    return lambda rope: f"none by {LONGEST:,}" if rope[key] is None else tokens(rope[key])


def _base(rope: Rope) -> str:
    theta = rope["rope_theta"]
    return f"{theta:,.0f}" if theta >= 1e4 or theta == int(theta) else f"{theta:,.6g}"


def _farthest(rope: Rope) -> str:
    """Empty if it is the distance of the target's last token."""
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
        ("pairs fully rotated by then", _share),
        ("slowest pair unique", _unique),
        ("critical dimension", lambda rope: f"{rope['critical_dimension']} of {rope['rotary_dim']}"),
    ),
    (
        ("first rise of the score, tokens", _found("first_rise")),
        ("first negative score, tokens", _found("first_negative_score")),
    ),
    (
        ("granularity (mean sine)", _digits("granularity")),
        ("its limit α/ln b", _digits("granularity_limit")),
        ("its exact limit", _digits("granularity_exact_limit")),
        ("closest images q", _digits("closest_images")),
        ("their gap, tokens", _tokens("closest_images_gap")),
        ("distance d to pretrained images", _digits("distance_to_old_images")),
        ("float32 angle error, rad", _digits("float32_angle_error", 2)),
    ),
)


def _bands_table(ropes: Sequence[dict[str, Any]]) -> list[RenderableType]:
    """ropes: the pretrained one first. Methods that keep all frequencies have no column."""
    pretrained, *methods = ropes
    methods = [rope for rope in methods if any(abs(one - 1) > _SAME for one in _known(rope))]
    rows = []
    for band, (low, high) in _BANDS.items():
        pairs = [pair for pair, r in enumerate(pretrained["turns_in_window"]) if low <= r < high]
        if pairs:
            wavelengths = [tokens(of(pretrained["wavelength"][pair] for pair in pairs)) for of in (min, max)]
            ratios = [[f"{_known(rope)[pair]:.3g}" for pair in (pairs[0], pairs[-1])] for rope in methods]
            ends = [f"{pairs[0]}", f"{pairs[-1]}"]
            rows.append([band, *(" to ".join(dict.fromkeys(each)) for each in (ends, wavelengths, *ratios))])
    title = "\npairs by number of rotations in the pretraining length, r = L/λ"
    title += "; per method, frequency relative to pretrained" if methods else ""
    names = ["rotations r", "pairs", "wavelength, tokens"]
    return [Text(title), FittingTable(names, [clean(rope["name"]) for rope in methods], rows)]


def _known(rope: dict[str, Any]) -> list[float]:
    """Frequency of each pair relative to the pretrained one; 1 if both are 0."""
    return [1.0 if math.isnan(one) else one for one in rope["frequency_over_pretrained"]]


def _decay_table(rope: dict[str, Any]) -> list[RenderableType]:
    """Omits columns without values: the bound only applies to frequencies that are powers of a base.

    Empty for a target of one token.
    """
    rows = rope["decay"]
    if not rows:
        return []
    shown = {key: name for key, name in _DECAY.items() if any(row[key] is not None for row in rows)}
    table = Table()
    for name in ("distance", *shown.values()):
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(f"{row['distance']:,}", *("" if row[key] is None else f"{row[key]:.3f}" for key in shown))
    title = f"\n{clean(rope['name'])}: inner product of an all-ones query and key, each with norm 1"
    bound = "; O(1/t): its bound" if "bound" in shown else ""
    note = (
        f"|mean|: of the complex rotations, whose real part is the score; integral: its estimate{bound}; sinusoidal: "
        "the score of sinusoidal embeddings with the pretrained base. Attention factors are not included."
    )
    return [Text(title), table, Text(note, "dim")]
