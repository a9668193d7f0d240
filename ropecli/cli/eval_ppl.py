"""ropecli eval-ppl: perplexity of one checkpoint at several lengths."""

from pathlib import Path
from typing import Annotated

import typer

from ropecli.cli import evaluation, options


def command(
    checkpoint: options.Checkpoint,
    data: evaluation.Data,
    lengths: evaluation.Lengths = "256,512,1024,2048",
    protocol: evaluation.Protocol = "prefix",
    targets: Annotated[
        int | None, typer.Option(min=1, help="tail: tokens scored per document; else half the shortest length.")
    ] = None,
    max_documents: evaluation.MaxDocuments = None,
    text_column: evaluation.TextColumn = "text",
    split: evaluation.Split = None,
    dtype: evaluation.Dtype = "auto",
    device: evaluation.Device = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the report here, as JSON.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure perplexity at several context lengths, with a 95% interval over documents."""
    from ropecli.checkpoint.plan import effective_ropes
    from ropecli.checkpoint.reading import open_checkpoint
    from ropecli.cli.progress import progress_bar
    from ropecli.cli.terminal import out, parse_numbers, print_json, warn
    from ropecli.evaluate.perplexity import count_passes, evaluate_perplexity, fresh_tables_if_switching
    from ropecli.evaluate.report import refuse_unwritable, write_report
    from ropecli.report.tables import perplexity_table

    refuse_unwritable(output)
    wanted = parse_numbers(lengths, "--lengths", int)
    opened = open_checkpoint(checkpoint, weights=True)
    ropes, settings = effective_ropes(opened)
    for warning in settings.warnings:
        warn(warning)
    documents = evaluation.read_data(opened, data, wanted[-1], max_documents, text_column, split)
    model = evaluation.load(opened, dtype, device)
    before = fresh_tables_if_switching(model, wanted[-1])
    passes = count_passes(wanted, len(documents.kept), protocol, before is not None)
    with progress_bar("scoring", passes) as step:
        rows = evaluate_perplexity(
            model, documents, wanted, protocol=protocol, targets=targets, before_length=before, advance=step
        )
    spec = max((rope.spec for rope in ropes.values()), key=lambda spec: spec.factor)
    report = evaluation.make_report(
        opened, spec, protocol=protocol, source=data, documents=documents, model=model, rows=rows
    )
    if output:
        write_report(output, report.as_json())
    if as_json:
        print_json(report.as_json())
    else:
        out.print(perplexity_table(report))
