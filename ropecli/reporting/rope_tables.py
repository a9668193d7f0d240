"""The tables of `ropecli inspect` and `ropecli theory`, from the reports of checkpoint/inspection.py.

Theory shows methods in YaRN's general form f(x, g(m), h(θ_d)) (arXiv:2309.00071, eq. 12). The band limits, 32 and 1
rotations, are its beta_fast and beta_slow (section 3.2).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ropecli.analysis.score import FARTHEST_CHECKED
from ropecli.config.dialects import ORIGINAL_LENGTH
from ropecli.evaluation.wording import tokens
from ropecli.scaling.registry import find_method
from ropecli.table import Bold, Table

Rope = dict[str, Any]
"""The summary of analysis/summary.py, with its name and form."""
_SAME = 1e-9
"""Relative tolerance for rounding errors of wavelengths."""
_BANDS = {"32 or more": (32, math.inf), "8 to 32": (8, 32), "1 to 8": (1, 8), "below 1": (0, 1)}


def inspection_table(reports: Sequence[dict[str, Any]], differing: Sequence[str] = ()) -> Table:
    """One column per rope; what holds for the whole checkpoint is in the first of its columns.

    reports: of inspect_checkpoint. differing: the fields to mark.
    """
    names = [f"{report['checkpoint']} ({report['model_type']})" for report in reports]
    ropes = [(report, rope) for report in reports for rope in report["ropes"]]
    rows: list[list[str]] = []
    sections = set()
    for name, (key, show) in _INSPECTED.items():
        cells = [
            show(rope[key]) if key in rope else show(report[key]) if rope is report["ropes"][0] else ""
            for report, rope in ropes
        ]
        if key == ORIGINAL_LENGTH and all(rope[key] == report["pretraining_length"] for report, rope in ropes):
            cells = [""] * len(ropes)  # the row "pretraining length" says it
        if key == "pretraining_length":
            sections.add(len(rows))
        if any(cells):
            rows.append([Bold(f"≠ {name}") if key in differing else name, *cells])
    several = len(names) > 1
    heads = [name * several for name, report in zip(names, reports, strict=True) for _ in report["ropes"]]
    return Table("" if several else names[0], ["", *heads], rows, sections=frozenset(sections))


def _parameters(params: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in params.items() if not isinstance(value, list))


def _wavelength(value: float | None) -> str:
    return "no pair rotates" if value is None else f"{tokens(value)} tokens"


def _text(value: str | None) -> str:
    return value or ""


def _length(value: Any) -> str:
    if value is None:
        return ""
    return "no limit" if isinstance(value, int | float) and value > 1e9 else f"{value} tokens"


_INSPECTED: dict[str, tuple[str, Any]] = {
    "layer type": ("layer_type", _text),
    "head_dim": ("head_dim", str),
    "rotary_dim": ("rotary_dim", str),
    "rope_theta": ("rope_theta", lambda value: f"{value:,.10g}"),
    "method": ("method", str),
    "parameters": ("params", _parameters),
    "factor": ("factor", lambda value: f"{value:g}"),
    "attention_factor": ("attention_factor", lambda value: f"{value:.6g}"),
    ORIGINAL_LENGTH: (ORIGINAL_LENGTH, _length),
    "shortest wavelength": ("shortest_wavelength", _wavelength),
    "longest wavelength": ("longest_wavelength", _wavelength),
    "pairs": ("pairs", str),
    "pairs with a full rotation in pretraining": ("pairs_rotating_in_pretraining_length", str),
    "pretraining length": ("pretraining_length", _length),
    "pretraining length from": ("pretraining_length_source", _text),
    "context length": ("context_length", _length),
    "max_position_embeddings": ("max_position_embeddings", _length),
    "tokenizer model_max_length": ("tokenizer_model_max_length", _length),
}


def theory_tables(report: dict[str, Any]) -> list[Table]:
    """report: of theory_report."""
    pretrained, *methods = report["ropes"]
    forms = [_forms(methods)] if methods else []
    return [*forms, _quantities(report), _bands(pretrained, methods), _decay(report["ropes"][-1])]


def _forms(methods: Sequence[Rope]) -> Table:
    """The change of a position m and of a pair's frequency θ_d by each method; distance methods change neither."""
    distances = "unchanged: the method changes distances"
    rows = [[rope["name"], rope["g"], rope["h"] if rope["g"] else distances, rope["interpolation"]] for rope in methods]
    title = "scaling of a position m and of a pair's frequency θ_d: f(x, g(m), h(θ_d))"
    return Table(title, ["method", "g(m)", "h(θ_d)", "interpolation"], rows, names=4)


def _quantities(report: dict[str, Any]) -> Table:
    """A column for each rope."""
    pretrained, length, target = report["ropes"][0], report["original_max_position_embeddings"], report["target_length"]
    rotations, granularity = pretrained["rotations_in_pretraining_length"], pretrained["granularity"]
    slow = [pair for pair, count in enumerate(rotations) if 0 < count < 1 - _SAME]
    ropes = []
    for rope in report["ropes"]:
        farthest = rope["largest_distance"]
        # rotations_in_target_length counts one token more than the largest distance
        reached = [rope["rotations_in_target_length"][pair] * farthest / (farthest + 1) for pair in slow]
        unseen = sum(turns > rotations[pair] * (1 + _SAME) for pair, turns in zip(slow, reached, strict=True))
        followed = {
            "farthest": None if farthest == target - 1 else farthest,
            "critical": f"{rope['critical_dimension']} of {rope['rotary_dim']}",
            "unseen": f"{unseen} of {len(slow)}",
            "kept": rope["granularity"] / granularity if granularity > 0 else math.nan,
        }
        ropes.append({**rope, **followed})
    layers = f" (layers of type {pretrained['layer_type']})" if pretrained["layer_type"] else ""
    title = f"{report['checkpoint']}{layers}: pretraining length {length:,}, target {target:,} tokens"
    base = report["smallest_base"]
    if base is None or math.isnan(base):
        smallest = "none was computed"
    else:
        smallest = "no base is enough" if math.isinf(base) else f"it must be at least {base:,.0f}"
    notes = [
        f"{len(slow)} of {len(rotations)} pairs are slow: they complete no rotation in the {length:,} tokens of "
        "pretraining, and beyond that reach angles that the model has not seen.",
        "A base supports the tokens before its first negative score (Men et al. 2024); "
        f"{smallest} for {target:,} tokens.",
        "Less granularity makes nearby positions harder to distinguish. q and d: 0 is equal, 2 opposite.",
    ]
    if varying := [rope["name"] for rope in ropes if find_method(rope["method"]).depends_on_length]:
        notes.append(
            f"The frequencies of {' and '.join(varying)} depend on the length: these are for {target:,} tokens."
        )
    rows = [[name, *(show(rope[key]) for rope in ropes)] for name, (key, show) in _ROWS.items()]
    return Table(title, ["", *(rope["name"] for rope in ropes)], rows, notes, sections=_SECTIONS)


def _digits(value: float | None, digits: int = 4) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{digits}g}"


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.0%}"


def _distance(value: int | None) -> str:
    return f"none by {FARTHEST_CHECKED:,}" if value is None else tokens(value)


_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "factor s": ("factor", partial(_digits, digits=6)),
    "largest distance seen, tokens": ("farthest", tokens),
    "attention factor": ("attention_factor", partial(_digits, digits=6)),
    "base b (rope_theta)": ("rope_theta", tokens),
    "longest wavelength, tokens": ("longest_wavelength", tokens),
    "slow pairs at unseen angles": ("unseen", str),
    "critical dimension": ("critical", str),
    "first negative score, tokens": ("first_negative_score", _distance),
    "granularity (mean sine)": ("granularity", _digits),
    "granularity kept": ("kept", _share),
    "closest images q": ("closest_images", _digits),
    "their gap, tokens": ("closest_images_gap", tokens),
    "distance d to pretrained images": ("distance_to_old_images", _digits),
}
_SECTIONS = frozenset({4, 7, 8})


def _bands(pretrained: Rope, methods: Sequence[Rope]) -> Table:
    """Methods that keep all frequencies have no column."""
    # NaN: a pair that rotates with neither
    shares = {
        rope["name"]: [1.0 if math.isnan(x) else x for x in rope["frequency_over_pretrained"]] for rope in methods
    }
    shares = {name: of for name, of in shares.items() if any(abs(share - 1) > _SAME for share in of)}
    rows = []
    for band, (low, high) in _BANDS.items():
        if pairs := [pair for pair, r in enumerate(pretrained["rotations_in_pretraining_length"]) if low <= r < high]:
            ends, wavelengths = (pairs[0], pairs[-1]), [pretrained["wavelength"][pair] for pair in pairs]
            columns: list[Iterable[str]] = [map(str, ends), map(tokens, (min(wavelengths), max(wavelengths)))]
            columns += [[f"{of[pair]:.3g}" for pair in ends] for of in shares.values()]
            rows.append([band, *(" to ".join(dict.fromkeys(column)) for column in columns)])
    title = "pairs by number of rotations in the pretraining length, r = L/λ"
    title += "; per method, frequency relative to pretrained" if shares else ""
    return Table(title, ["rotations r", "pairs", "wavelength, tokens", *shares], rows, names=3)


def _decay(rope: Rope) -> Table:
    title = f"{rope['name']}: decay of the inner product of a query and a key with equal weight in every pair"
    rows = [[tokens(row["distance"]), _digits(row["score"], 3), _digits(row["magnitude"], 3)] for row in rope["decay"]]
    return Table(title, ["distance", "score", "magnitude"], rows, ["Attention factors are not included."])
