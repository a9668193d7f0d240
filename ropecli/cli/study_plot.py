"""The plots of `ropecli plot` that are computed of a checkpoint: which methods they show."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

_FACTOR = 4.0
"""Unless another is asked for; as in compare."""


class Asked(NamedTuple):
    """The options that are for these kinds alone, as they were given."""

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


def study_of(kind: str, checkpoints: Sequence[str], asked: Asked):
    """Raises MethodError, CheckpointError, and DataError for more than one checkpoint."""
    from ropecli.checkpoint.reading import open_checkpoint
    from ropecli.checkpoint.study import make_study
    from ropecli.cli.scaling import method_specs
    from ropecli.errors import DataError, MethodError

    if len(checkpoints) > 1:
        raise DataError(f"--kind {kind} draws one checkpoint, and {len(checkpoints)} were given; give one.")
    checkpoint = open_checkpoint(checkpoints[0], revision=asked.revision)
    factor = _FACTOR if asked.factor is None else asked.factor
    if asked.methods is not None:
        specs = method_specs(asked.methods, [factor], asked.settings, asked.factors_file)
        return make_study(checkpoint, specs, asked.original_length)
    if given := [option for option in asked.named if option in ("--set", "--factors-file", "--original-length")]:
        raise MethodError(f"{', '.join(given)}: for a --method, and none was given. Example: --method yarn --factor 4.")
    return make_study(checkpoint, _defaults(kind, checkpoint, factor, asked.factor is not None))


def _defaults(kind: str, checkpoint, factor: float, at_factor: bool) -> list[Any]:
    """The checkpoint as it is and the methods of the kind, but those that do not suit its geometry."""
    from ropecli.checkpoint.plan import make_plan
    from ropecli.cli.terminal import warn
    from ropecli.errors import MethodError
    from ropecli.report.study import DEFAULT_METHODS
    from ropecli.rope import ScalingSpec
    from ropecli.scaling.registry import check_factor

    check_factor(factor)
    specs: list[ScalingSpec | None] = [None]
    if at_factor and not DEFAULT_METHODS[kind]:  # the methods would set the target
        specs.append(ScalingSpec("none", factor))
    for name, params in DEFAULT_METHODS[kind].items():
        spec = ScalingSpec(name, factor, params)
        try:
            make_plan(checkpoint, spec)
        except MethodError as error:
            warn(f"{name} is left out: {error}")
            continue
        specs.append(spec)
    return specs
