"""ropecli plot: what reports say, as a picture or in the terminal."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="JSON files that --output wrote.")],
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            "-k",
            help="perplexity, context (loss by tokens read), comparison, retrieval; else what suits them.",
        ),
    ] = None,
    metric: Annotated[
        str, typer.Option(help="ppl, or bits-per-byte, which may be compared between tokenizers.")
    ] = "ppl",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw here (PNG, SVG or PDF), and not in the terminal.")
    ] = None,
) -> None:
    """Plot evaluation reports."""
    from ropecli.atomic import refuse_unwritable
    from ropecli.cli.terminal import out, warn
    from ropecli.errors import DataError
    from ropecli.report.kinds import choose_kind
    from ropecli.report.lines import data_note
    from ropecli.report.metrics import get_metric
    from ropecli.report.plots import draw_report_plot, refuse_unknown_kind
    from ropecli.report.reading import perplexity_reports, read_reports

    refuse_unknown_kind(output)
    refuse_unwritable(output)
    wanted = get_metric(metric)
    found = read_reports(reports)
    chosen = choose_kind(found, kind)
    if wanted.name != "ppl" and not chosen.metrics:
        raise DataError(f"--metric {metric} is for plots of perplexity; this kind has an axis of its own.")
    if output is None:
        out.print(chosen.terminal(found, wanted))
        return
    draw_report_plot(found, output, metric, kind)
    measured = perplexity_reports(found)
    note = data_note(measured, wanted) if measured else None
    if note:
        warn(f"{note}.")
    out.print(f"plot: {output}", markup=False, soft_wrap=True)
