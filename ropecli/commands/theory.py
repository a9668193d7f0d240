"""`ropecli theory`: the quantities that papers use to explain a scaling."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from annotated_doc import Doc

from ropecli import options
from ropecli.atomic import optional_path, refuse_unwritable
from ropecli.messages import warn
from ropecli.options import Overwrite
from ropecli.signature import Only, command

if TYPE_CHECKING:
    from ropecli.scaling.spec import ScalingSpec


@dataclass(frozen=True)
class Theory:
    """report: the quantities of each rope. plot: the drawn file."""

    report: dict[str, Any]
    plot: Path | None = None

    def as_json(self) -> dict[str, Any]:
        return self.report


@command
def theory(
    checkpoint: options.CheckpointName,
    *,
    methods: Annotated[options.Methods, Doc("Methods, separated by commas; as-is: no change. Default: as-is.")] = None,
    factor: Annotated[options.ScalingFactor, Only("methods")] = None,
    revision: options.Revision = None,
    plot: Annotated[options.Picture, Doc("Draw the frequencies of each method: .png, .svg or .pdf.")] = None,
    overwrite: Annotated[Overwrite, Only("plot")] = False,
    **shared: Unpack[options.ParameterOptions],
) -> Theory:
    """Show the quantities with which papers explain a scaling.

    Wavelengths, decay, granularity and base bounds.
    Reads only config.json. Compares each method with the pretrained frequencies.
    """
    from ropecli.checkpoint.inspection import compared_ropes, theory_report
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.scalings import method_specs

    picture = optional_path(plot)
    refuse_unwritable(picture, overwrite=overwrite)
    opened = open_checkpoint(checkpoint, revision=revision)
    specs: list[ScalingSpec | None] = [None]
    if methods is not None:
        factors = [] if factor is None else [factor]
        specs = method_specs(methods, factors, shared["settings"], shared["factors_file"])
    ropes, target, findings = compared_ropes(opened, specs, shared["original_length"])
    for finding in findings:
        warn(finding.message)
    if picture:
        from ropecli.reporting.figures.plots import draw_frequencies
        from ropecli.reporting.figures.style import save

        save(draw_frequencies(opened.name, ropes, target), picture)
    return Theory(theory_report(opened.name, ropes, target, findings), picture)
