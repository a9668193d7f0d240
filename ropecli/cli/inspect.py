"""ropecli inspect: what a checkpoint's files say of its positions, and what is off in them."""

from typing import Annotated, Any

import typer

from ropecli.cli import options


def command(
    checkpoint: options.Checkpoint,
    other: Annotated[str | None, typer.Argument(help="A second checkpoint, to be shown beside the first.")] = None,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a checkpoint's rotary geometry, scaling and lengths, and find what readers would silently get wrong.

    Reads config.json and the tokenizer's, without loading the model. With two checkpoints, shows them side by side
    and marks where they differ.
    """
    from ropecli.checkpoint.inspection import differences, inspect_checkpoint
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.terminal import out, print_json

    opened = [open_checkpoint(checkpoint, revision=revision)]
    if other is not None:
        opened.append(open_checkpoint(other))
    reports = [inspect_checkpoint(one) for one in opened]
    differing = differences(reports)
    if as_json:
        print_json(reports[0] if other is None else {"checkpoints": reports, "differences": differing})
        return
    out.print(_table(reports, differing))
    for report in reports:
        _print_bound(report, named=other is not None)
        _print_findings(report, named=other is not None)


def _table(reports: list[dict[str, Any]], differing: list[str]):
    from rich.markup import escape
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
    """What holds for the whole checkpoint stands in the first of its columns."""
    return [cell, *[""] * (columns - 1)]


def _print_bound(report: dict[str, Any], named: bool) -> None:
    from ropecli.cli.terminal import out
    from ropecli.reporting.theory_sentences import base_bound_sentence

    of = f"{report['checkpoint']}: " if named else ""
    out.print(f"{of}{base_bound_sentence(report)}", markup=False)


def _print_findings(report: dict[str, Any], named: bool) -> None:
    from ropecli.cli.terminal import out

    of = f" in {report['checkpoint']}" if named else ""
    findings = report["findings"]
    if not findings:
        out.print(f"nothing to mend{of}", markup=False)
        return
    out.print(f"\n{len(findings)} to look at{of}:", markup=False)
    fixes: dict[str | None, list[dict[str, Any]]] = {}
    for finding in findings:
        fixes.setdefault(finding["fix"], []).append(finding)
    for fix, own in fixes.items():
        for finding in own:
            out.print(f"[yellow]{finding['rule']}[/]:", end=" ")
            out.print(finding["message"], markup=False, soft_wrap=True)
        if fix:
            out.print(f"  mended by: {fix}", markup=False, soft_wrap=True)


def _parameters(params: dict[str, Any]) -> str:
    shown = {key: value for key, value in params.items() if not isinstance(value, list)}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _wavelength(value: float | None) -> str:
    from ropecli.reporting.wording import tokens

    return "none turns" if value is None else f"{tokens(value)} tokens"


def _name(value: Any) -> str:
    from rich.markup import escape

    return escape(value or "")


def _tokens(value: Any) -> str:
    from rich.markup import escape

    if value is None:
        return ""
    endless = isinstance(value, int | float) and value > 1e9
    return "no limit" if endless else escape(f"{value} tokens")


_ROPE_ROWS: dict[str, tuple[str, Any]] = {
    "layer type": ("layer_type", lambda value: value or ""),
    "head_dim": ("head_dim", str),
    "rotary_dim": ("rotary_dim", str),
    "rope_theta": ("rope_theta", lambda value: f"{value:,.10g}"),
    "method": ("method", str),
    "parameters": ("params", _parameters),
    "factor": ("factor", lambda value: f"{value:g}"),
    "attention_factor": ("attention_factor", lambda value: f"{value:.6g}"),
    "original_max_position_embeddings": ("original_max_position_embeddings", _tokens),
    "shortest wavelength": ("shortest_wavelength", _wavelength),
    "longest wavelength": ("longest_wavelength", _wavelength),
    "pairs": ("pairs", str),
    "pairs with a whole turn in pretraining": ("pairs_turning_in_original_window", str),
    "angle error of float32 at the end": ("float32_angle_error", lambda value: f"{value:.1e} rad"),
}
_CHECKPOINT_ROWS: dict[str, tuple[str, Any]] = {
    "max_position_embeddings": ("max_position_embeddings", _tokens),
    "tokenizer model_max_length": ("tokenizer_model_max_length", _tokens),
    "weights tuned, those before": ("tuned_from", _name),
}
