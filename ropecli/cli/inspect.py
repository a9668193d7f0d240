"""Prints `ropecli inspect`: one or two checkpoints side by side, what the makers advise, and problems."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ropecli.cli.terminal import out, show_tables, tell
from ropecli.table import Bold, Table

if TYPE_CHECKING:
    from ropecli.commands.inspect import Inspection


def render(inspection: "Inspection") -> None:
    show_tables([_table(inspection.reports, inspection.differences)])
    several = len(inspection.reports) > 1
    for report in inspection.reports:
        _print_extension(report, named=several)
        _print_findings(report, named=several)


def _table(reports: Sequence[dict[str, Any]], differing: Sequence[str]) -> Table:
    """One column per rope; what holds for the whole checkpoint is in the first of its columns."""
    names = [f"{report['checkpoint']} ({report['model_type']})" for report in reports]
    ropes = [(report, rope) for report in reports for rope in report["ropes"]]
    rows = []
    for name, (key, show) in _ROWS.items():
        cells = [
            show(rope[key]) if key in rope else show(report[key]) if rope is report["ropes"][0] else ""
            for report, rope in ropes
        ]
        if key == _ORIGINAL and all(rope[key] == report["pretraining_length"] for report, rope in ropes):
            cells = [""] * len(ropes)  # the row "pretraining length" says it
        rows.append([Bold(f"≠ {name}") if key in differing else name, *cells])
    several = len(names) > 1
    heads = [name * several for name, report in zip(names, reports, strict=True) for _ in report["ropes"]]
    return Table(
        "" if several else names[0], ["", *heads], rows, sections=frozenset({list(_ROWS).index("pretraining length")})
    )


def _print_extension(report: dict[str, Any], named: bool) -> None:
    extension = report["makers_extension"]
    if extension is None:
        return
    of = f" of {report['checkpoint']}" if named else ""
    training = ", with training" if extension["needs_training"] else ""
    tell(
        f"The makers{of} extend it by {extension['method']} ×{extension['factor']:g} to {extension['context_length']} "
        f"tokens{training} ({extension['source']}):\n  {extension['command']}"
    )


def _print_findings(report: dict[str, Any], named: bool) -> None:
    of = f" in {report['checkpoint']}" if named else ""
    findings = report["findings"]
    if not findings:
        tell(f"No problems found{of}.")
        return
    tell(f"\n{len(findings)} problem{'s'[: len(findings) != 1]} found{of}:")
    fixes: dict[str | None, list[dict[str, Any]]] = {}
    for finding in findings:
        fixes.setdefault(finding["fix"], []).append(finding)
    for fix, rules in fixes.items():
        for finding in rules:
            out.print(f"[yellow]{finding['rule']}[/]:", end=" ")
            tell(finding["message"])
        if fix:
            tell(f"  fix: {fix}")


def _parameters(params: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in params.items() if not isinstance(value, list))


def _wavelength(value: float | None) -> str:
    from ropecli.reporting.wording import tokens

    return "no pair rotates" if value is None else f"{tokens(value)} tokens"


def _name(value: str | None) -> str:
    return value or ""


def _tokens(value: Any) -> str:
    if value is None:
        return ""
    return "no limit" if isinstance(value, int | float) and value > 1e9 else f"{value} tokens"


_ORIGINAL = "original_max_position_embeddings"
_ROWS: dict[str, tuple[str, Any]] = {
    "layer type": ("layer_type", _name),
    "head_dim": ("head_dim", str),
    "rotary_dim": ("rotary_dim", str),
    "rope_theta": ("rope_theta", lambda value: f"{value:,.10g}"),
    "method": ("method", str),
    "parameters": ("params", _parameters),
    "factor": ("factor", lambda value: f"{value:g}"),
    "attention_factor": ("attention_factor", lambda value: f"{value:.6g}"),
    _ORIGINAL: (_ORIGINAL, _tokens),
    "shortest wavelength": ("shortest_wavelength", _wavelength),
    "longest wavelength": ("longest_wavelength", _wavelength),
    "pairs": ("pairs", str),
    "pairs with a full rotation in pretraining": ("pairs_rotating_in_pretraining_length", str),
    "float32 angle error at the end": ("float32_angle_error", lambda value: f"{value:.1e} rad"),
    "pretraining length": ("pretraining_length", _tokens),
    "pretraining length from": ("pretraining_length_source", _name),
    "context length": ("context_length", _tokens),
    "max_position_embeddings": ("max_position_embeddings", _tokens),
    "tokenizer model_max_length": ("tokenizer_model_max_length", _tokens),
    "weights tuned from": ("tuned_from", _name),
}
