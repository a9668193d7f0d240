"""Prints `ropecli inspect`: one or two checkpoints side by side, what the makers advise, and problems."""

from typing import TYPE_CHECKING, Any

from rich.markup import escape

from ropecli.cli.terminal import out

if TYPE_CHECKING:
    from rich.table import Table

    from ropecli.commands.inspect import Inspection


def render(inspection: "Inspection") -> None:
    out.print(_table(inspection.reports, inspection.differences))
    several = len(inspection.reports) > 1
    for report in inspection.reports:
        _print_extension(report, named=several)
        _print_findings(report, named=several)


def _table(reports: "tuple[dict[str, Any], ...]", differing: "tuple[str, ...]") -> "Table":
    from rich.table import Table

    names = [f"{report['checkpoint']} ({report['model_type']})" for report in reports]
    title = escape(names[0]) if len(names) == 1 else None
    table = Table(title=title, title_justify="left", show_header=len(names) > 1)
    table.add_column(style="bold", overflow="fold")
    for name, report in zip(names, reports, strict=True):
        for _rope in report["ropes"]:
            table.add_column(escape(name), justify="right", overflow="fold")
    for name, (key, show) in _ROPE_ROWS.items():
        cells = [show(rope[key]) for report in reports for rope in report["ropes"]]
        if key == _ORIGINAL and all(rope[key] == one["pretraining_length"] for one in reports for rope in one["ropes"]):
            continue  # the row "pretraining length" says it
        if any(cells):
            table.add_row(_marked(name, key in differing), *cells)
    table.add_section()
    for name, (key, show) in _CHECKPOINT_ROWS.items():
        cells = [cell for report in reports for cell in _once(show(report[key]), len(report["ropes"]))]
        if any(cells):
            table.add_row(_marked(name, key in differing), *cells)
    return table


def _marked(name: str, differs: bool) -> str:
    return f"[yellow]≠ {name}[/]" if differs else name


def _once(cell: str, columns: int) -> list[str]:
    """A value of the whole checkpoint, in the first of its columns."""
    return [cell, *[""] * (columns - 1)]


def _print_extension(report: dict[str, Any], named: bool) -> None:
    extension = report["makers_extension"]
    if extension is None:
        return
    of = f" of {report['checkpoint']}" if named else ""
    training = ", with training" if extension["needs_training"] else ""
    out.print(
        f"The makers{of} extend it by {extension['method']} ×{extension['factor']:g} to {extension['context_length']} "
        f"tokens{training} ({extension['source']}):\n  {extension['command']}",
        markup=False,
        soft_wrap=True,
    )


def _print_findings(report: dict[str, Any], named: bool) -> None:
    of = f" in {report['checkpoint']}" if named else ""
    findings = report["findings"]
    if not findings:
        out.print(f"No problems found{of}.", markup=False)
        return
    out.print(f"\n{len(findings)} problem{'s'[: len(findings) != 1]} found{of}:", markup=False)
    fixes: dict[str | None, list[dict[str, Any]]] = {}
    for finding in findings:
        fixes.setdefault(finding["fix"], []).append(finding)
    for fix, own in fixes.items():
        for finding in own:
            out.print(f"[yellow]{finding['rule']}[/]:", end=" ")
            out.print(finding["message"], markup=False, soft_wrap=True)
        if fix:
            out.print(f"  fix: {fix}", markup=False, soft_wrap=True)


def _parameters(params: dict[str, Any]) -> str:
    shown = {key: value for key, value in params.items() if not isinstance(value, list)}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _wavelength(value: float | None) -> str:
    from ropecli.reporting.wording import tokens

    return "no pair rotates" if value is None else f"{tokens(value)} tokens"


def _name(value: Any) -> str:
    return escape(value or "")


def _tokens(value: Any) -> str:
    if value is None:
        return ""
    endless = isinstance(value, int | float) and value > 1e9
    return "no limit" if endless else escape(f"{value} tokens")


_ORIGINAL = "original_max_position_embeddings"
_ROPE_ROWS: dict[str, tuple[str, Any]] = {
    "layer type": ("layer_type", lambda value: value or ""),
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
    "pairs with a full rotation in pretraining": ("pairs_turning_in_original_window", str),
    "float32 angle error at the end": ("float32_angle_error", lambda value: f"{value:.1e} rad"),
}
_CHECKPOINT_ROWS: dict[str, tuple[str, Any]] = {
    "pretraining length": ("pretraining_length", _tokens),
    "pretraining length from": ("pretraining_length_source", _name),
    "context length": ("context_length", _tokens),
    "max_position_embeddings": ("max_position_embeddings", _tokens),
    "tokenizer model_max_length": ("tokenizer_model_max_length", _tokens),
    "weights tuned from": ("tuned_from", _name),
}
