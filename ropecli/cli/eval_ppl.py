"""ropecli eval-ppl: perplexity of one checkpoint at several lengths."""

from pathlib import Path
from typing import Annotated

import typer

from ropecli.cli import evaluation, options, scaling


def command(
    checkpoint: options.Checkpoint,
    data: evaluation.Data,
    lengths: evaluation.Lengths = "256,512,1024,2048",
    protocol: evaluation.Protocol = "prefix",
    targets: Annotated[
        int | None, typer.Option(min=1, help="tail: tokens scored per document; else half the shortest length.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-m", help="Patch the model in memory, by a method of `ropecli methods`; with --factor."
        ),
    ] = None,
    factor: scaling.Factor = None,
    settings: scaling.Settings = None,
    factors_file: scaling.FactorsFile = None,
    original_length: scaling.OriginalLength = None,
    max_documents: evaluation.MaxDocuments = None,
    text_column: evaluation.TextColumn = "text",
    split: evaluation.Split = None,
    dtype: evaluation.Dtype = "auto",
    device: evaluation.Device = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the report here, as JSON.")] = None,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure perplexity at several context lengths, with a 95% interval over documents."""
    from ropecli.checkpoint.reading import open_checkpoint
    from ropecli.cli.progress import progress_bar
    from ropecli.cli.terminal import out, parse_numbers, print_json, warn
    from ropecli.evaluate.perplexity import count_passes, evaluate_perplexity, fresh_tables_if_switching
    from ropecli.evaluate.report import refuse_unwritable, write_report
    from ropecli.report.tables import perplexity_table

    refuse_unwritable(output)
    wanted = parse_numbers(lengths, "--lengths", int)
    params = scaling.parameters(method or "none", settings, factors_file)
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    spec, rope, plan, warnings = _scaling(opened, method, factor, params, original_length)
    for warning in warnings:
        warn(warning)
    documents = evaluation.read_data(opened, data, wanted[-1], max_documents, text_column, split)
    model = evaluation.load(opened, dtype, device)
    switching = _patch_in_memory(model, plan) if plan else fresh_tables_if_switching(model, wanted[-1]) is not None
    passes = count_passes(wanted, len(documents.kept), protocol, switching)
    with progress_bar("scoring", passes) as step:
        rows = evaluate_perplexity(
            model, documents, wanted, protocol=protocol, targets=targets, switching=switching, advance=step
        )
    report = evaluation.make_report(
        opened,
        spec,
        rope,
        protocol=protocol,
        source=data,
        documents=documents,
        model=model,
        rows=rows,
        in_memory=plan is not None,
    )
    if output:
        write_report(output, report.as_json())
    if as_json:
        print_json(report.as_json())
    else:
        out.print(perplexity_table(report))


def _scaling(checkpoint, method: str | None, factor: float | None, params: dict, original_length: int | None):
    """The scaling to report, the rope it gives, the plan to patch by (None for the checkpoint as it is), warnings."""
    from ropecli.checkpoint.plan import effective_ropes, main_rope, make_plan
    from ropecli.errors import MethodError
    from ropecli.rope import ScalingSpec

    if method is None:
        if factor is not None or params or original_length is not None:
            raise MethodError("--factor, --set, --factors-file and --original-length are for a --method.")
        ropes, settings = effective_ropes(checkpoint)
        rope = main_rope(ropes, settings)
        return rope.spec, rope, None, settings.warnings
    if factor is None and method != "none":
        raise MethodError(f"{method} needs --factor, as --factor 4.")
    plan = make_plan(
        checkpoint, ScalingSpec(method, 1.0 if factor is None else factor, params), original_length=original_length
    )
    return plan.spec, plan.ropes[plan.scaled[0]], plan, plan.scaling_warnings


def _patch_in_memory(model, plan) -> bool:
    """Whether the frequencies then follow the length."""
    from ropecli.checkpoint.live import live_patch
    from ropecli.evaluate.comparison import switches

    live_patch(model, plan.ropes)
    return switches(plan)
