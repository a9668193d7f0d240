"""ropecli inspect: what a checkpoint's config.json says of its positions."""

from typing import Any

from ropecli.cli import options


def command(
    checkpoint: options.Checkpoint,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a checkpoint's rotary geometry, scaling and windows, read from config.json without loading the model."""
    from ropecli.checkpoint.inspection import inspect_checkpoint
    from ropecli.checkpoint.reading import open_checkpoint
    from ropecli.cli.terminal import out, print_json, warn

    report = inspect_checkpoint(open_checkpoint(checkpoint, revision=revision))
    for warning in report["warnings"]:
        warn(warning)
    if as_json:
        print_json(report)
    else:
        out.print(_table(report))


def _table(report: dict[str, Any]):
    from rich.markup import escape
    from rich.table import Table

    title = escape(f"{report['checkpoint']} ({report['model_type']})")
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    for _rope in report["ropes"]:
        table.add_column(justify="right")
    for name, show in _ROWS.items():
        cells = [show(rope) for rope in report["ropes"]]
        if any(cells):
            table.add_row(name, *cells)
    table.add_section()
    tokenizer = report["tokenizer_model_max_length"]
    table.add_row("max_position_embeddings", f"{report['max_position_embeddings']} tokens")
    if tokenizer is not None:
        endless = isinstance(tokenizer, int | float) and tokenizer > 1e9
        table.add_row("tokenizer model_max_length", "no limit" if endless else escape(f"{tokenizer} tokens"))
    return table


def _parameters(rope: dict[str, Any]) -> str:
    shown = {key: value for key, value in rope["params"].items() if not isinstance(value, list)}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def _tokens(value: float | None) -> str:
    return "none turns" if value is None else f"{value:,.4g} tokens" if value < 1e4 else f"{value:,.0f} tokens"


_ROWS = {
    "layer type": lambda rope: rope["layer_type"] or "",
    "head_dim": lambda rope: str(rope["head_dim"]),
    "rotary_dim": lambda rope: str(rope["rotary_dim"]),
    "rope_theta": lambda rope: f"{rope['rope_theta']:,.10g}",
    "method": lambda rope: rope["method"],
    "parameters": _parameters,
    "factor": lambda rope: f"{rope['factor']:g}",
    "attention_factor": lambda rope: f"{rope['attention_factor']:.6g}",
    "original_max_position_embeddings": lambda rope: f"{rope['original_max_position_embeddings']} tokens",
    "shortest wavelength": lambda rope: _tokens(rope["shortest_wavelength"]),
    "longest wavelength": lambda rope: _tokens(rope["longest_wavelength"]),
    "pairs that turn in that window": lambda rope: f"{rope['pairs_turning_in_original_window']} of {rope['pairs']}",
}
