"""`ropecli patch`: writes a checkpoint with a longer context."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_doc import Doc

from ropecli import options
from ropecli.atomic import folder_to_write
from ropecli.errors import MethodError
from ropecli.messages import say, warn
from ropecli.names import LENGTH_ONLY
from ropecli.signature import Flag, Interval, command

if TYPE_CHECKING:
    from ropecli.checkpoint.patch_plan import PatchPlan


@dataclass(frozen=True)
class PatchResult:
    """plan: the patch. output: the written folder, None for a dry run. proved: number of proved rotary tables."""

    plan: "PatchPlan"
    output: Path | None
    proved: int

    def as_json(self) -> dict[str, Any]:
        positions = self.plan.positions
        return {
            "output": str(self.output) if self.output else None,
            "method": self.plan.spec.method.name,
            "factor": self.plan.spec.factor,
            "original_max_position_embeddings": positions.pretraining_length,
            "target_length": positions.context_length,
            "changes": [change._asdict() for change in self.plan.changes],
            "proved_tables": self.proved or None,
            "findings": [finding.as_json() for finding in self.plan.findings],
        }


@command
def patch(
    checkpoint: options.CheckpointName,
    *,
    method: Annotated[
        str,
        options.IS_METHOD,
        Doc(
            "One of `ropecli methods`: none, unscaled, linear, abf, ntk, dynamic, ntk-by-parts, yarn, llama3, "
            "longrope, cope, resonance, p-rope, nope, custom; rerope, leaky-rerope, self-extend, jet-long, dual-chunk, "
            "string, lm-infinite, streaming. Join several with +, such as yarn+resonance."
        ),
        options.SCALING,
    ],
    factor: options.ScalingFactor = None,
    target_length: Annotated[
        int | None,
        Interval(ge=1),
        options.TOKENS,
        Doc("Target length. Sets the factor, unless --factor gives another."),
        options.SCALING,
    ] = None,
    output: options.OptionalFolder = None,
    settings: options.Settings = None,
    factors_file: options.FactorsFile = None,
    original_length: options.OriginalLength = None,
    layer_types: Annotated[
        Sequence[str] | None,
        Flag("--layer-types", metavar="TYPE,..."),
        Doc("Scale the layers of these types. Default: the layers with full attention."),
        options.SCALING,
    ] = None,
    weights: options.Weights = "link",
    dry_run: Annotated[
        bool, Doc("Prove the patch, print the changes of config.json and write nothing."), options.OUTPUT
    ] = False,
    no_verify: Annotated[
        bool,
        Doc("Skip the proof that the model's rotary tables match. Distance methods are always proved."),
        options.OUTPUT,
    ] = False,
    revision: options.Revision = None,
) -> PatchResult:
    """Write a copy with a longer context, and prove it."""
    if factor is None and target_length is None and method not in LENGTH_ONLY:
        raise MethodError(f"{method} needs --factor or --target-length, such as --factor 4.")
    folder = folder_to_write(output, dry_run=dry_run)

    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.checkpoint.scalings import read_factors
    from ropecli.scaling.spec import make_spec

    opened = open_checkpoint(checkpoint, weights=folder is not None, revision=revision)
    plan = make_plan(
        opened,
        make_spec(
            method, 1.0 if factor is None else factor, {**read_factors(method, factors_file), **(settings or {})}
        ),
        target_length=target_length,
        original_length=original_length,
        layer_types=layer_types,
        choose_factor=factor is None,
    )
    return write_plan(plan, folder, link=weights == "link", verify=not no_verify)


def write_plan(
    plan: "PatchPlan",
    output: Path | None,
    *,
    link: bool,
    verify: bool,
    check: Callable[[Path], None] = lambda folder: None,
) -> PatchResult:
    """check: called on the complete folder before it is renamed."""
    from ropecli.checkpoint.writing import write_patch
    from ropecli.config.families import is_known

    if plan.remapping:  # may refuse: before the warnings
        from ropecli.attention.patching import with_layout

        plan = with_layout(plan)
    if verify:
        say("Proving the patch in stock transformers ...")
        from ropecli.live.proof import prove
    if verify and any(layer.attention is None for layer in plan.settings.layers):
        from ropecli.attention.layer_probe import refuse_without_effect

        refuse_without_effect(plan)
    for finding in plan.findings:
        warn(finding.message)
    if not verify and not is_known(plan.config):
        warn(
            f"not proved: that model_type {plan.config.get('model_type')!r}, which ropecli does not know, reads these "
            "RoPE fields. They were read by their usual names."
        )
    proved = 0
    if output is not None:
        proved = write_patch(plan, output, prove=prove if verify else None, link=link, check=check)
    elif verify:  # so that a dry run refuses what `patch` refuses
        from ropecli.live.stock_transformers import stock_config_of

        proved = prove(stock_config_of(plan.config, plan.source.name), plan.positions.ropes, plan.original)
    return PatchResult(plan, output, proved)
