"""ropecli patch: write a copy of a checkpoint whose positions reach further."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropecli.cli import options, scaling


def command(
    checkpoint: options.Checkpoint,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help="One of `ropecli methods`: none, linear, abf, ntk, dynamic, ntk-by-parts, yarn, llama3, longrope, "
            "p-rope, nope, custom; rerope, leaky-rerope, self-extend, dual-chunk, lm-infinite, streaming.",
        ),
    ] = None,
    factor: scaling.Factor = None,
    target_length: Annotated[
        int | None,
        typer.Option(help="Target length in tokens; the factor follows from it, unless --factor gives another."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The folder to write.")] = None,
    settings: scaling.Settings = None,
    factors_file: scaling.FactorsFile = None,
    original_length: scaling.OriginalLength = None,
    layer_types: Annotated[
        str | None,
        typer.Option(help="Scale the layers of these types (commas between), not those that see the whole context."),
    ] = None,
    weights: Annotated[str, typer.Option(help="link: hard-link where possible; copy: always copy.")] = "link",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the change of config.json and write nothing.")
    ] = False,
    no_verify: Annotated[
        bool,
        typer.Option(
            "--no-verify",
            help="Do not prove the patch against the live rotary modules. What changes the attention is proved anyway.",
        ),
    ] = False,
    revert: Annotated[
        bool, typer.Option("--revert", help="Take all patches back: write the checkpoint as it was before them.")
    ] = False,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a copy of a checkpoint whose positions reach further, and prove that the patch took effect."""
    from ropecli.atomic import refuse_existing
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.checkpoint.writing import write_patch
    from ropecli.cli import reverting
    from ropecli.cli.terminal import print_json, warn
    from ropecli.errors import OutputError, PatchError
    from ropecli.scaling.spec import make_spec

    given = {
        "--method": method,
        "--factor": factor,
        "--target-length": target_length,
        "--set": settings,
        "--factors-file": factors_file,
        "--original-length": original_length,
        "--layer-types": layer_types,
        "--no-verify": no_verify or None,
    }
    method = _check_options(method, factor, target_length, weights, given if revert else None)
    if dry_run:
        output = None
    elif output is None:
        raise OutputError("patch writes a new folder: name it with --output DIR (or look first with --dry-run).")
    else:
        refuse_existing(output)
    if revert:
        reverting.run(checkpoint, revision, output, link=weights == "link", as_json=as_json)
        return
    plan = make_plan(
        open_checkpoint(checkpoint, weights=output is not None, revision=revision),
        make_spec(method, 1.0 if factor is None else factor, scaling.parameters(method, settings, factors_file)),
        target_length=target_length,
        original_length=original_length,
        layer_types=None if layer_types is None else [name.strip() for name in layer_types.split(",") if name.strip()],
        choose_factor=factor is None,
    )
    if plan.unwritable:
        raise PatchError(plan.unwritable)
    if plan.remaps:  # before the warnings: a refusal is said alone
        from ropecli.attention.patching import with_layout

        plan = with_layout(plan)
    for warning in plan.warnings:
        warn(warning)
    proved = 0
    if output is not None:
        proved = write_patch(plan, output, prove=None if no_verify else _prove, link=weights == "link", say=warn)
    if as_json:
        print_json(_summary(plan, output, proved))
    else:
        _render(plan, output, proved)


def _prove(folder: Path, ropes: Any) -> int:
    from ropecli.live.proof import prove

    return prove(folder, ropes)


def _check_options(
    method: str | None,
    factor: float | None,
    target_length: int | None,
    weights: str,
    beside_revert: dict[str, Any] | None,
) -> str:
    """The method; empty for --revert, which takes none of the options `beside_revert`."""
    from ropecli.errors import MethodError
    from ropecli.scaling.registry import find_method

    if weights not in ("link", "copy"):
        raise MethodError(f"--weights is {weights!r}; it must be 'link' or 'copy'.")
    if beside_revert is not None:
        if useless := [option for option, value in beside_revert.items() if value is not None]:
            raise MethodError(f"--revert takes the patches back; it has no use for {', '.join(useless)}. Leave it out.")
        return ""
    if method is None:
        raise MethodError("patch needs --method NAME, as --method yarn; or --revert, to take patches back.")
    find_method(method)
    if factor is None and target_length is None and method != "none":
        raise MethodError(f"{method} needs --factor or --target-length, as --factor 4.")
    return method


def _summary(plan, output: Path | None, proved: int) -> dict[str, Any]:
    return {
        "output": str(output) if output else None,
        "method": plan.spec.method.name,
        "factor": plan.spec.factor,
        "target_length": plan.target_length,
        "changes": [change._asdict() for change in plan.changes],
        "proved_tables": proved or None,
        "warnings": list(plan.warnings),
    }


def _render(plan, output: Path | None, proved: int) -> None:
    from ropecli.cli.terminal import out, show_changes

    factor = f"{plan.spec.method} ×{plan.spec.factor:g}"
    if output is None:
        out.print(f"{plan.source.name}: {factor}, {plan.target_length} tokens", markup=False, soft_wrap=True)
        show_changes("config.json", plan.changes)
        return
    out.print(f"{plan.source.name} → {output}: {factor}, {plan.target_length} tokens", markup=False, soft_wrap=True)
    if proved:
        tables = "table agrees" if proved == 1 else "tables agree"
        out.print(f"proved: {proved} live rotary {tables} with the mathematics")
    else:
        out.print("not proved (--no-verify): that the live rotary tables agree with the mathematics", soft_wrap=True)
    if any(rope.remapping for rope in plan.ropes.values()):
        agrees = "proved: on a small model of this architecture, the attention agrees with the model's own"
        out.print(agrees, soft_wrap=True)
