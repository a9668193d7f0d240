"""ropecli theory: the quantities by which the papers explain a scaling, of a checkpoint, methods and a target."""

from typing import Annotated

import typer

from ropecli.cli import options, scaling


def command(
    checkpoint: options.Checkpoint,
    methods: Annotated[
        str | None,
        typer.Option("--method", "-m", help="Methods with commas between; as-is: no change. Without: as-is alone."),
    ] = None,
    factor: scaling.Factor = None,
    settings: scaling.SeveralSettings = None,
    factors_file: scaling.FactorsFile = None,
    original_length: scaling.OriginalLength = None,
    revision: options.Revision = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what a scaling does, in the papers' quantities: wavelengths, decay, granularity, base bounds.

    Reads config.json alone. Each method stands beside the frequencies as they were pretrained.
    """
    from ropecli.checkpoint.inspection import make_study, study_report
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.terminal import out, print_json, warn
    from ropecli.reporting.theory_tables import theory_tables

    opened = open_checkpoint(checkpoint, revision=revision)
    specs = scaling.study_specs(methods, factor, settings, factors_file, original_length)
    study = make_study(opened, specs, original_length)
    for warning in study.warnings:
        warn(warning)
    report = study_report(study)
    if as_json:
        print_json(report)
        return
    out.print(theory_tables(report))
