"""`ropecli theory`: the quantities by which the papers explain a scaling, of a checkpoint, methods and a target."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli.commands import options
from ropecli.commands.messages import warn
from ropecli.commands.options import Flag

if TYPE_CHECKING:
    from ropecli.checkpoint.inspection import Study
    from ropecli.scaling.spec import ScalingSpec


@dataclass(frozen=True)
class Theory:
    """study: the ropes that were compared. report: their quantities."""

    study: "Study"
    report: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return self.report


def theory(
    checkpoint: options.Checkpoint,
    *,
    method: Annotated[
        Sequence[str] | None,
        Flag("--method", "-m"),
        Doc("Methods with commas between; as-is: no change. Without: as-is alone."),
    ] = None,
    factor: options.Factor = None,
    settings: options.SeveralSettings = None,
    factors_file: options.FactorsFile = None,
    original_length: options.OriginalLength = None,
    revision: options.Revision = None,
) -> Theory:
    """Say what a scaling does, in the papers' quantities: wavelengths, decay, granularity, base bounds.

    Reads config.json alone. Each method stands beside the frequencies as they were pretrained.
    """
    from ropecli.checkpoint.inspection import make_study, study_report
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.commands.scalings import method_specs, refuse_without_method

    opened = open_checkpoint(checkpoint, revision=revision)
    specs: list[ScalingSpec | None] = [None]
    if method is not None:
        factors = [] if factor is None else [factor]
        specs = method_specs(options.listed(method), factors, settings, factors_file)
    if method is None:
        refuse_without_method(factor, settings or None, factors_file, original_length)
    elif specs == [None]:
        refuse_without_method(factor, factors_file, original_length)
    study = make_study(opened, specs, original_length)
    for warning in study.warnings:
        warn(warning)
    return Theory(study, study_report(study))
