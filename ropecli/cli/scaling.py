"""The options that name one scaling method, and what they mean: patch and eval-ppl share them."""

from pathlib import Path
from typing import Annotated, Any

import typer

Factor = Annotated[float | None, typer.Option(help="Target window ÷ pretraining window.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the method; repeatable.")
]
FactorsFile = Annotated[
    Path | None,
    typer.Option(
        help="Numbers for longrope or custom: a JSON list of factors, or an object with long_factor, factors or "
        "inv_freq; for longrope also a config.json that has them."
    ),
]
OriginalLength = Annotated[
    int | None, typer.Option(min=1, help="The true pretraining window, where config.json names another.")
]


def parameters(method: str, settings: list[str] | None, factors_file: Path | None) -> dict[str, Any]:
    """The method's parameters from --set and --factors-file. Raises MethodError."""
    from ropecli.cli.terminal import parse_settings

    return {**_read_factors(method, factors_file), **parse_settings(settings)}


def _read_factors(method: str, path: Path | None) -> dict[str, Any]:
    """A JSON object with the method's parameters, or a list of its factors."""
    import json

    from ropecli.errors import MethodError

    if path is None:
        return {}
    lists = {"longrope": "long_factor", "custom": "factors"}
    if method not in lists:
        raise MethodError(f"--factors-file is for {' and '.join(lists)}; {method} takes no list of numbers.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MethodError(f"{path} cannot be read as JSON: {error}") from error
    if isinstance(value, list):
        value = {lists[method]: value}
    named = {"longrope": ("long_factor",), "custom": ("factors", "inv_freq")}[method]
    if isinstance(value, dict) and method == "longrope":
        value = _of_config(value) or value
    if not isinstance(value, dict) or not any(key in value for key in named):
        raise MethodError(f"{path} must hold a list of factors, or an object with {' or '.join(named)}.")
    return value


def _of_config(config: dict[str, Any]) -> dict[str, Any]:
    """The parameters of longrope that a config.json holds; empty where it is none, or scales otherwise."""
    from ropecli.checkpoint.dialects import read_settings

    if not any(isinstance(config.get(key), dict) for key in ("rope_parameters", "rope_scaling", "text_config")):
        return {}
    ropes = read_settings(config).ropes
    return next((dict(rope.spec.params) for rope in ropes if rope.spec.method == "longrope"), {})
