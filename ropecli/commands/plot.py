"""`ropecli plot`: draws reports, or the theory of a checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli import demo
from ropecli.commands import options
from ropecli.commands.report import DrawnFile
from ropecli.errors import DataError, MethodError
from ropecli.evaluation import request
from ropecli.messages import warn
from ropecli.names import check_report
from ropecli.signature import Flag, OneOf, Only, command

if TYPE_CHECKING:
    from ropecli.checkpoint.opening import Checkpoint
    from ropecli.scaling.spec import ScalingSpec

_FACTOR = 4.0
"""The default factor, as in compare."""
_DEFAULT_METHODS = {"linear": {}, "abf": {"beta": 50.0}, "ntk": {}, "yarn": {}, "llama3": {}, "p-rope": {}}
_THEORY = "frequencies"
_STUDY = Only("kind", (_THEORY,))


@command
def plot(
    subjects: Annotated[
        Sequence[str],
        Flag("subjects", metavar="REPORT|CHECKPOINT"),
        Doc("Reports written with --output, or one checkpoint for the kinds that draw theory."),
    ],
    *,
    kind: Annotated[
        str | None,
        Flag("--kind", "-k"),
        OneOf(("lengths", "scores", _THEORY)),
        Doc("For reports: lengths, scores. Default: what fits the reports. For a checkpoint: frequencies."),
    ] = None,
    methods: Annotated[
        Sequence[str] | None,
        Flag("--methods"),
        request.IS_METHOD,
        Doc("Methods, separated by commas. Default: six that differ."),
        _STUDY,
        request.SCALING,
    ] = None,
    output: Annotated[
        str | Path | None,
        Flag("--output", "-o", metavar="FILE"),
        Doc("Picture to write: .png, .svg or .pdf. Default: a PNG beside the first report, or ./KIND.png."),
        request.OUTPUT,
    ] = None,
    factor: Annotated[request.ScalingFactor, _STUDY] = None,
    revision: Annotated[request.Revision, _STUDY] = None,
    **shared: Unpack[request.ParameterOptions],
) -> DrawnFile:
    """Draw a plot of reports, or of the theory of a checkpoint."""
    if kind not in _STUDY.values:
        _refuse_other_files(kind, subjects)
    from ropecli.reporting.figures.style import refuse_unknown_ending, save
    from ropecli.reporting.outputs import refuse_unusable

    picture = options.optional_path(output)
    refuse_unknown_ending(picture)
    refuse_unusable(drawn=picture)
    if kind == _THEORY:
        scaling = {"methods": methods, "factor": factor, "revision": revision, **shared}
        figure, beside = _draw_study(subjects, scaling), Path(f"{kind}.png")
    else:
        figure = _draw_reports(kind, subjects)
        beside = options.as_path(subjects[0]).with_suffix(".png")
    if picture is None:
        picture = beside
        refuse_unusable(drawn=picture)
    save(figure, picture)
    return DrawnFile("plot", picture)


def _refuse_other_files(kind: str | None, subjects: Sequence[str]) -> None:
    """Raise DataError for a subject that is not a report; OSError."""
    for name in subjects:
        if kind is None and (name == demo.NAME or options.as_path(name).is_dir()):
            raise DataError(f"{name} is not a report. Plot a checkpoint with --kind {' or '.join(_STUDY.values)}.")
        check_report(name)


def _draw_reports(kind: str | None, subjects: Sequence[str]) -> Any:
    from ropecli.evaluation.report import Report
    from ropecli.reporting.figures.plots import choose_kind
    from ropecli.reporting.lines import DATA_NOTE, sets_of
    from ropecli.reporting.report_files import read_reports

    reports = read_reports([options.as_path(name) for name in subjects])
    draw = choose_kind(reports, kind)
    measured = [report for report in reports if isinstance(report, Report)]
    if measured and len(sets_of(measured)) > 1:
        warn(f"{DATA_NOTE}.")
    return draw(reports)


def _draw_study(subjects: Sequence[str], scaling: Mapping[str, Any]) -> Any:
    """Raises MethodError, CheckpointError, and DataError for more than one checkpoint."""
    from ropecli.checkpoint.inspection import make_study
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.scalings import method_specs
    from ropecli.reporting.figures.plots import draw_frequencies

    if len(subjects) > 1:
        raise DataError(f"--kind {_THEORY} draws one checkpoint; {len(subjects)} were given.")
    checkpoint = open_checkpoint(subjects[0], revision=scaling["revision"])
    factor = _FACTOR if scaling["factor"] is None else scaling["factor"]
    if scaling["methods"] is not None:
        specs = method_specs(scaling["methods"], [factor], scaling["settings"], scaling["factors_file"])
        study = make_study(checkpoint, specs, scaling["original_length"])
    else:
        study = make_study(checkpoint, _default_specs(_DEFAULT_METHODS, checkpoint, factor))
    for finding in study.findings:
        warn(finding.message)
    return draw_frequencies(study)


def _default_specs(
    methods: Mapping[str, Mapping[str, Any]], checkpoint: "Checkpoint", factor: float
) -> "list[ScalingSpec | None]":
    """The checkpoint as it is and the methods, without those that its geometry refuses."""
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import check_factor, make_spec

    check_factor(factor)
    specs: list[ScalingSpec | None] = [None]
    for name, params in methods.items():
        spec = make_spec(name, factor, params)
        try:
            make_plan(checkpoint, spec, in_memory=True)
        except MethodError as error:
            warn(f"Skipping {name}: {error}")
            continue
        specs.append(spec)
    return specs
