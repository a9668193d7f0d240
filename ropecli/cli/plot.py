"""ropecli plot: what reports say, or a checkpoint's frequencies, as a picture or in the terminal."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ropecli.cli import options, scaling


class _Plot(NamedTuple):
    """figure: made when asked for. note: to be said beside a picture."""

    figure: Callable[[], Any]
    chart: Callable[[], Any]
    note: str | None = None


def command(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="REPORT...|CHECKPOINT",
            help="JSON files that --output wrote; for the kinds that follow theory, one checkpoint.",
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind",
            "-k",
            help="Of reports: perplexity, context (loss by tokens read), comparison, retrieval; of tune.json tuning, "
            "gains, tuned-frequencies; else what suits them. "
            "Of a checkpoint: wavelengths, decay (score by distance), helix, frequencies, tradeoff (granularity by "
            "distance to the old images).",
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="ppl, or bits-per-byte, which may be compared between tokenizers.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--method", "-m", help="Of a checkpoint: methods with commas between; else what shows the kind."),
    ] = None,
    factor: scaling.Factor = None,
    settings: scaling.SeveralSettings = None,
    factors_file: scaling.FactorsFile = None,
    original_length: scaling.OriginalLength = None,
    revision: options.Revision = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw here (PNG, SVG or PDF), and not in the terminal.")
    ] = None,
    terminal: Annotated[bool, typer.Option("--terminal", help="Draw in the terminal, beside --output too.")] = False,
) -> None:
    """Plot reports of evaluations and tunings, or what theory says of a checkpoint and its scaling."""
    from ropecli.cli.outputs import refuse_outputs
    from ropecli.cli.study_plot import Asked
    from ropecli.cli.terminal import out, warn
    from ropecli.report.kinds import refuse_unknown_name
    from ropecli.report.plots.style import refuse_unknown_kind, save
    from ropecli.report.study import STUDY_KINDS

    refuse_unknown_name(kind)
    refuse_unknown_kind(output)
    refuse_outputs(drawn=output)
    asked = Asked(methods, factor, settings, factors_file, original_length, revision)
    plot = (
        _of_study(kind, subjects, metric, asked) if kind in STUDY_KINDS else _of_reports(kind, subjects, metric, asked)
    )
    if output is not None:
        save(plot.figure(), output)
        if plot.note:
            warn(f"{plot.note}.")
    if terminal or output is None:
        out.print(plot.chart())
    if output is not None:
        out.print(f"plot: {output}", markup=False, soft_wrap=True)


def _of_study(kind: str, subjects: list[str], metric: str | None, asked) -> _Plot:
    from ropecli.cli.study_plot import study_of
    from ropecli.cli.terminal import warn
    from ropecli.errors import DataError
    from ropecli.report.study import study_chart, study_figure

    if metric is not None:
        raise DataError(f"--metric {metric} is for plots of reports; --kind {kind} has axes of its own. Leave it out.")
    study = study_of(kind, subjects, asked)
    for warning in study.warnings:
        warn(warning)
    return _Plot(lambda: study_figure(kind, study), lambda: study_chart(kind, study))


def _of_reports(kind: str | None, subjects: list[str], metric: str | None, asked) -> _Plot:
    from ropecli import demo
    from ropecli.errors import DataError
    from ropecli.report.kinds import choose_kind
    from ropecli.report.lines import data_note
    from ropecli.report.metrics import get_metric
    from ropecli.report.reading import perplexity_reports, read_reports
    from ropecli.report.study import STUDY_KINDS

    kinds = f"--kind {', '.join(STUDY_KINDS[:-1])} or {STUDY_KINDS[-1]}"
    if asked.named:
        raise DataError(f"{', '.join(asked.named)}: for plots of a checkpoint, by {kinds}.")
    paths = options.expanded([Path(name) for name in subjects])
    if kind is None and len(subjects) == 1 and (subjects[0] == demo.NAME or paths[0].is_dir()):
        raise DataError(f"{subjects[0]} is no report. A checkpoint is plotted by {kinds}.")
    wanted = get_metric(metric or "ppl")
    reports = read_reports(paths)
    chosen = choose_kind(reports, kind)
    if wanted.name != "ppl" and not chosen.metrics:
        raise DataError(f"--metric {metric} is for plots of perplexity; this kind has an axis of its own.")
    measured = perplexity_reports(reports)
    note = data_note(measured, wanted) if measured else None
    return _Plot(lambda: chosen.figure(reports, wanted), lambda: chosen.terminal(reports, wanted), note)
