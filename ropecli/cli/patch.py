"""ropecli patch: write a copy of a checkpoint whose positions reach further."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropecli.cli import options


def command(
    checkpoint: options.Checkpoint,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            "-m",
            help="none, linear, abf, ntk, dynamic, ntk-by-parts, yarn, llama3 or longrope; the README describes them.",
        ),
    ],
    factor: Annotated[float | None, typer.Option(help="Target window ÷ pretraining window.")] = None,
    target_length: Annotated[int | None, typer.Option(help="Target window in tokens, in place of --factor.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The folder to write.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of the method; repeatable.")
    ] = None,
    factors_file: Annotated[
        Path | None, typer.Option(help="longrope's factors: a JSON list, or an object with long_factor.")
    ] = None,
    original_length: Annotated[
        int | None, typer.Option(min=1, help="The true pretraining window, where config.json names another.")
    ] = None,
    weights: Annotated[str, typer.Option(help="link: hard-link where possible; copy: always copy.")] = "link",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the change of config.json and write nothing.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not prove the patch against the live rotary modules.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Write a copy of a checkpoint with scaled rotary embeddings, and prove that it took effect."""
    from ropecli.atomic import refuse_existing
    from ropecli.checkpoint.plan import make_plan
    from ropecli.checkpoint.reading import open_checkpoint
    from ropecli.checkpoint.writing import patch_to
    from ropecli.cli.terminal import parse_settings, print_json, warn
    from ropecli.errors import OutputError
    from ropecli.rope import ScalingSpec

    _check_options(method, factor, target_length, weights)
    if dry_run:
        output = None
    elif output is None:
        raise OutputError("patch writes a new folder: name it with --output DIR (or look first with --dry-run).")
    else:
        refuse_existing(output)
    params = {**_read_factors(factors_file), **parse_settings(settings)}
    plan = make_plan(
        open_checkpoint(checkpoint, weights=output is not None),
        ScalingSpec(method, 1.0 if factor is None else factor, params),
        target_length=target_length,
        original_length=original_length,
    )
    for warning in plan.warnings:
        warn(warning)
    proved = 0
    if output is not None:
        proved = patch_to(plan, output, link=weights == "link", verify=not no_verify)
    if as_json:
        print_json(_summary(plan, output, proved))
    else:
        _render(plan, output, proved)


def _check_options(method: str, factor: float | None, target_length: int | None, weights: str) -> None:
    from ropecli.errors import MethodError
    from ropecli.scaling.registry import get_method

    get_method(method)
    if factor is not None and target_length is not None:
        raise MethodError("--factor and --target-length were both given; the one follows from the other.")
    if factor is None and target_length is None and method != "none":
        raise MethodError(f"{method} needs --factor or --target-length, as --factor 4.")
    if weights not in ("link", "copy"):
        raise MethodError(f"--weights is {weights!r}; it must be 'link' or 'copy'.")


def _read_factors(path: Path | None) -> dict[str, Any]:
    """A JSON object with long_factor (short_factor, attention_factor), or one list for both."""
    import json

    from ropecli.errors import MethodError

    if path is None:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise MethodError(f"{path} cannot be read as JSON: {error}") from error
    if isinstance(value, list):
        value = {"long_factor": value}
    if not isinstance(value, dict) or "long_factor" not in value:
        raise MethodError(f"{path} must hold a list of factors, or an object with long_factor.")
    return value


def _summary(plan, output: Path | None, proved: int) -> dict[str, Any]:
    return {
        "output": str(output) if output else None,
        "method": plan.spec.method,
        "factor": plan.spec.factor,
        "target_length": plan.target_length,
        "changes": [change._asdict() for change in plan.changes],
        "proved_tables": proved or None,
        "warnings": list(plan.warnings),
    }


def _render(plan, output: Path | None, proved: int) -> None:
    from ropecli.cli.terminal import out

    factor = f"{plan.spec.method} ×{plan.spec.factor:g}"
    if output is None:
        out.print(f"{plan.source.name}: {factor}, {plan.target_length} tokens", markup=False, soft_wrap=True)
        out.print("config.json would change so:")
        for change in plan.changes:
            out.print(f"  {change.path}", markup=False)
            out.print(f"    [red]- {_shown(change.before)}[/]\n    [green]+ {_shown(change.after)}[/]", soft_wrap=True)
        return
    out.print(f"{plan.source.name} → {output}: {factor}, {plan.target_length} tokens", markup=False, soft_wrap=True)
    if proved:
        tables = "table agrees" if proved == 1 else "tables agree"
        out.print(f"proved: {proved} live rotary {tables} with the mathematics")
    else:
        out.print("not proved (--no-verify)")


def _shown(value: Any) -> str:
    import json

    from rich.markup import escape

    return escape(value if value == "<absent>" else json.dumps(value))
