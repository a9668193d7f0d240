"""ropecli compare: several methods and factors at several lengths, one table and one plot."""

from pathlib import Path
from typing import Annotated

import typer

from ropecli.cli import evaluation, options


def command(
    checkpoint: options.Checkpoint,
    data: evaluation.Data,
    methods: Annotated[str, typer.Option("--methods", "-m", help="Methods with commas between.")] = (
        "none,linear,ntk,dynamic,llama3,ntk-by-parts,yarn"
    ),
    factors: Annotated[str, typer.Option("--factors", "-f", help="Factors with commas between.")] = "4",
    lengths: evaluation.Lengths = "256,512,1024,2048",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="METHOD.KEY=VALUE", help="A parameter of one method.")
    ] = None,
    protocol: evaluation.Protocol = "prefix",
    max_documents: evaluation.MaxDocuments = None,
    text_column: evaluation.TextColumn = "text",
    split: evaluation.Split = None,
    dtype: evaluation.Dtype = "auto",
    device: evaluation.Device = "auto",
    plot: Annotated[Path | None, typer.Option(help="Draw perplexity against length here (PNG or SVG).")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the reports here, as JSON.")] = None,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare scaling methods by perplexity, without writing checkpoints: the model is patched in memory."""
    from ropecli.checkpoint.reading import open_checkpoint
    from ropecli.cli.progress import progress_bar
    from ropecli.cli.terminal import out, parse_numbers, print_json, warn
    from ropecli.evaluate.comparison import compare_methods, plan_comparison, switches
    from ropecli.evaluate.perplexity import count_passes
    from ropecli.evaluate.report import refuse_unwritable, write_report
    from ropecli.report.plots import plot_perplexity, refuse_unknown_kind
    from ropecli.report.tables import comparison_table

    refuse_unknown_kind(plot)
    refuse_unwritable(plot)
    refuse_unwritable(output)
    wanted = parse_numbers(lengths, "--lengths", int)
    opened = open_checkpoint(checkpoint, weights=True, revision=revision)
    plans = plan_comparison(opened, _specs(methods, parse_numbers(factors, "--factors", float), settings))
    for warning in dict.fromkeys(warning for plan in plans for warning in plan.settings_warnings):
        warn(warning)
    documents = evaluation.read_data(opened, data, wanted[-1], max_documents, text_column, split)
    model = evaluation.load(opened, dtype, device)
    passes = sum(count_passes(wanted, len(documents.kept), protocol, switches(plan)) for plan in plans)
    with progress_bar("scoring", passes) as step:
        results = compare_methods(model, plans, documents, wanted, protocol=protocol, advance=step)
    reports = [
        evaluation.make_report(
            opened,
            plan.spec,
            plan.ropes[plan.scaled[0]],
            protocol=protocol,
            source=data,
            documents=documents,
            model=model,
            rows=rows,
            in_memory=True,
        )
        for plan, rows in zip(plans, results, strict=True)
    ]
    if plot:
        window = next(iter(plans[0].ropes.values())).geometry.original_max_position_embeddings
        plot_perplexity(reports, plot, window)
    if output:
        write_report(output, [report.as_json() for report in reports])
    if as_json:
        print_json([report.as_json() for report in reports])
    else:
        out.print(comparison_table(reports))
        if plot:
            out.print(f"plot: {plot}", markup=False)


def _specs(methods: str, factors: list[float], settings: list[str] | None) -> list:
    """Every method at every factor. `--set yarn.beta_fast=8` sets a parameter of one method."""
    from ropecli.cli.terminal import parse_settings
    from ropecli.errors import MethodError
    from ropecli.rope import ScalingSpec
    from ropecli.scaling.registry import get_method

    names = [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise MethodError("--methods names no method.")
    params: dict[str, dict] = {get_method(name).name: {} for name in names}
    for key, value in parse_settings(settings).items():
        method, dot, parameter = key.partition(".")
        if not dot or method not in params:
            raise MethodError(f"--set {key}=...: it has the form METHOD.KEY=VALUE, for one of {', '.join(params)}.")
        params[method][parameter] = value
    return [ScalingSpec(name, factor, params[name]) for name in params for factor in factors]
