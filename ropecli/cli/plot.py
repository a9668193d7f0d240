"""ropecli plot: what reports say, or a checkpoint's frequencies, as a picture in a file."""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from ropecli.cli import options, scaling

_FACTOR = 4.0
"""Of the methods that a kind shows, unless another is asked for; as in compare."""


class _Asked(NamedTuple):
    """The options that are for plots of a checkpoint alone, as they were given."""

    methods: str | None
    factor: float | None
    settings: list[str] | None
    factors_file: Path | None
    original_length: int | None
    revision: str | None

    @property
    def named(self) -> list[str]:
        """The options that were given at all."""
        names = ("--method", "--factor", "--set", "--factors-file", "--original-length", "--revision")
        return [name for name, value in zip(names, self, strict=True) if value is not None]


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
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the picture here: PNG, SVG or PDF. Default: a PNG beside the first report, of a checkpoint "
            "./KIND.png.",
        ),
    ] = None,
) -> None:
    """Plot reports of evaluations and tunings, or what theory says of a checkpoint and its scaling, into a file."""
    from ropecli.cli.outputs import refuse_outputs
    from ropecli.cli.terminal import out
    from ropecli.reporting.figures.style import refuse_unknown_ending, save
    from ropecli.reporting.plot_kinds import STUDY_KINDS, refuse_unknown_kind

    refuse_unknown_kind(kind)
    refuse_unknown_ending(output)
    refuse_outputs(drawn=output)
    asked = _Asked(methods, factor, settings, factors_file, original_length, revision)
    if kind in STUDY_KINDS:
        figure, beside = _draw_study(kind, subjects, metric, asked), Path(f"{kind}.png")
    else:
        figure = _draw_reports(kind, subjects, metric, asked)
        beside = options.expanded(Path(subjects[0])).with_suffix(".png")
    if output is None:
        output = _default_output(beside)
        refuse_outputs(drawn=output)
    save(figure, output)
    out.print(f"plot: {output}", markup=False, soft_wrap=True)


def _default_output(path: Path) -> Path:
    """The path, or its name in the current folder where it lies in a checkpoint's. Raises OutputError for both."""
    from ropecli.errors import OutputError

    for folder in (path.parent, Path()):
        if not _is_checkpoints(folder.resolve()):
            return folder / path.name
    raise OutputError(f"{path.name} would lie in a checkpoint's folder. Name another place with --output.")


def _is_checkpoints(folder: Path) -> bool:
    """Whether it is a checkpoint's folder, or lies in the Hub's cache."""
    from ropecli.checkpoint.files import ADAPTER_CONFIG, CONFIG

    cached = any(part.startswith("models--") for part in folder.parts)
    return cached or any((folder / name).exists() for name in (CONFIG, ADAPTER_CONFIG))


def _draw_reports(kind: str | None, subjects: list[str], metric: str | None, asked: _Asked) -> Any:
    from ropecli import demo
    from ropecli.cli.terminal import warn
    from ropecli.errors import DataError
    from ropecli.evaluation.eval_report import EvalReport
    from ropecli.reporting.lines import data_note, get_metric
    from ropecli.reporting.plot_kinds import STUDY_KINDS, choose_kind
    from ropecli.reporting.report_files import read_reports

    kinds = f"--kind {', '.join(STUDY_KINDS[:-1])} or {STUDY_KINDS[-1]}"
    if asked.named:
        raise DataError(f"{', '.join(asked.named)}: for plots of a checkpoint, by {kinds}.")
    paths = options.expanded([Path(name) for name in subjects])
    if kind is None and len(subjects) == 1 and (subjects[0] == demo.NAME or paths[0].is_dir()):
        raise DataError(f"{subjects[0]} is not a report. Plot a checkpoint with {kinds}.")
    wanted = get_metric(metric or "ppl")
    reports = read_reports(paths)
    chosen = choose_kind(reports, kind)
    if wanted.name != "ppl" and not chosen.metrics:
        raise DataError(f"--metric {metric} is for plots of perplexity; this kind has an axis of its own.")
    measured = [report for report in reports if isinstance(report, EvalReport)]
    if measured and (note := data_note(measured, wanted)):
        warn(f"{note}.")
    return chosen.figure(reports, wanted)


def _draw_study(kind: str, subjects: list[str], metric: str | None, asked: _Asked) -> Any:
    """Raises MethodError, CheckpointError, and DataError for more than one checkpoint."""
    from ropecli.checkpoint.inspection import make_study
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.cli.terminal import warn
    from ropecli.errors import DataError, MethodError
    from ropecli.reporting.plot_kinds import draw_study

    if metric is not None:
        raise DataError(f"--metric {metric} is for plots of reports; --kind {kind} has axes of its own. Leave it out.")
    if len(subjects) > 1:
        raise DataError(f"--kind {kind} draws one checkpoint, and {len(subjects)} were given; give one.")
    checkpoint = open_checkpoint(subjects[0], revision=asked.revision)
    factor = _FACTOR if asked.factor is None else asked.factor
    if asked.methods is not None:
        specs = scaling.method_specs(asked.methods, [factor], asked.settings, asked.factors_file)
        study = make_study(checkpoint, specs, asked.original_length)
    elif given := [option for option in asked.named if option in ("--set", "--factors-file", "--original-length")]:
        raise MethodError(f"{', '.join(given)}: for a --method, and none was given. Example: --method yarn --factor 4.")
    else:
        study = make_study(checkpoint, _default_specs(kind, checkpoint, factor, asked.factor is not None))
    for warning in study.warnings:
        warn(warning)
    return draw_study(kind, study)


def _default_specs(kind: str, checkpoint, factor: float, at_factor: bool) -> list[Any]:
    """The checkpoint as it is and the methods of the kind, but those that do not suit its geometry."""
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.cli.terminal import warn
    from ropecli.errors import MethodError
    from ropecli.reporting.plot_kinds import DEFAULT_METHODS
    from ropecli.scaling.spec import ScalingSpec, check_factor, make_spec

    check_factor(factor)
    specs: list[ScalingSpec | None] = [None]
    if at_factor and not DEFAULT_METHODS[kind]:  # the methods would set the target
        specs.append(make_spec("none", factor))
    for name, params in DEFAULT_METHODS[kind].items():
        spec = make_spec(name, factor, params)
        try:
            make_plan(checkpoint, spec)
        except MethodError as error:
            warn(f"{name} is left out: {error}")
            continue
        specs.append(spec)
    return specs
