"""Plans a patch: everything that it would write, without writing it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ropecli.checkpoint import plan_warnings
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import CheckpointState, Positions, far_layers, read_state, scale_layers
from ropecli.config.changes import ConfigChange, diff
from ropecli.config.dialects import MSCALE_PAIR
from ropecli.config.encoding import write_settings
from ropecli.config.findings import Finding
from ropecli.config.layers import no_effect
from ropecli.config.saved_remapping import SavedRemapping, write_saved_remapping
from ropecli.config.settings import RopeSettings, read_settings
from ropecli.errors import MethodError, PatchError
from ropecli.names import LENGTH_ONLY
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScaledRope, ScalingSpec, check_factor


@dataclass(frozen=True)
class PatchPlan:
    """The changes that a patch would write.

    positions: after the patch; the main rope is that of the first scaled layer type, and the pretraining length its
    geometry's. written: the ropes to write, by scaled layer type. remapping: of a distance method. original: the config
    before any patch, and its settings. max_position_embeddings: the value to write, tokens.
    """

    source: Checkpoint
    spec: ScalingSpec
    positions: Positions
    written: dict[str | None, ScaledRope]
    remapping: SavedRemapping | None
    original: dict[str, Any]
    settings: RopeSettings
    max_position_embeddings: int
    findings: tuple[Finding, ...]

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json after the patch. Raises PatchError if it cannot express the scaling."""
        config = copy.deepcopy(self.original)
        write_settings(config, self.settings, self.written, self.max_position_embeddings)
        if self.remapping is not None:
            write_saved_remapping(config, self.remapping)
        return config

    @property
    def changes(self) -> tuple[ConfigChange, ...]:
        """From the current config.json to the patched one."""
        return tuple(diff(self.source.config, self.config))

    @property
    def findings_in_memory(self) -> tuple[Finding, ...]:
        """Without those that only concern a patch on disk."""
        return tuple(finding for finding in self.findings if finding.record.about != "writing")


def _before_patches(
    state: CheckpointState, original_length: int | None = None, *, keeps_shipped: bool = False
) -> tuple[dict[str, Any], RopeSettings, tuple[Finding, ...]]:
    """The config before any patch, its RoPE settings, and findings.

    original_length: overrides the pretraining length, tokens. keeps_shipped: whether the scaling in config.json stays.
    Raises PatchError if the original config is unknown.
    """
    if state.note is None:
        _refuse_unknown_original(state)
    config = copy.deepcopy(state.note.original if state.note is not None else state.checkpoint.config)
    theirs = None if original_length or keeps_shipped else state.before.overruled_by
    length = theirs.pretraining_length if theirs else original_length
    settings = read_settings(config, length) if length else state.before
    findings = state.edit_findings + settings.findings
    makers = theirs or settings.makers
    if makers is not None and makers.pretraining_length != state.before.config_length:
        of_makers = (
            f"the pretraining length is {makers.pretraining_length} tokens ({makers.source}); config.json alone gives "
            f"{state.before.config_length}. Overrule it with --original-length."
        )
        findings = (Finding("makers-length", of_makers), *findings)
    return config, settings, findings


def make_plan(
    checkpoint: Checkpoint,
    spec: ScalingSpec,
    *,
    target_length: int | None = None,
    original_length: int | None = None,
    layer_types: Sequence[str] | None = None,
    choose_factor: bool = True,
    in_memory: bool = False,
) -> PatchPlan:
    """Plan a patch of `checkpoint`.

    target_length: tokens. choose_factor: compute the factor from target_length and the pretraining length, ignoring
    spec.factor. original_length: overrides the pretraining length. layer_types: the layer types to scale. Default:
    those that see the whole context. Method `none` keeps the scaling that the checkpoint ships with, and by default
    its context length; `unscaled` removes it. in_memory: also for a scaling that config.json cannot express. Raises
    MethodError for a factor or target out of range or without effect, PatchError for unknown layer types, and for
    scalings that the architecture or config.json does not support.
    """
    state, keeps = read_state(checkpoint), spec.method.name == "none"
    config, settings, findings = _before_patches(state, original_length, keeps_shipped=keeps)
    labels = _labels_to_scale(checkpoint.name, settings, spec, layer_types)
    first = next(rope for rope in settings.ropes if rope.geometry.layer_type in labels)
    original, shipped = first.geometry.original_max_position_embeddings, first.spec
    if spec.method.name == "none" and spec.factor == 1 and target_length is None:
        target_length = max(original, settings.context_length)
    if target_length is not None and target_length < original:
        raise MethodError(
            f"The target length {target_length} is below the pretraining length, {original}. Increase it, or correct "
            "the pretraining length with --original-length."
        )
    if target_length is not None and choose_factor:
        spec = replace(spec, factor=target_length / original)
    check_factor(spec.factor)
    target = target_length or round(original * spec.factor)
    keeps &= shipped.method.name != "none"
    spec = _with_softmax_scale(_beside_shipped(spec, shipped), shipped)
    ropes = scale_layers(settings, spec, labels, target)
    rope = ropes[labels[0]]
    unchanged = np.array_equal(rope.inv_freq, rope.geometry.inv_freq()) and rope.attention_factor == 1
    if spec.factor == 1 and spec.method.uses_factor and unchanged:
        raise MethodError(
            f"{spec.method} ×1 has no effect: the target length is the pretraining length, {target} tokens. Increase "
            "--factor or --target-length, or correct the pretraining length with --original-length."
        )
    # transformers uses max_position_embeddings as dynamic NTK's pretraining length: raising it would disable the method
    written_length = original if spec.method.rope_type == "dynamic" else target
    scaled = {label: ropes[label] for label in labels}
    # for a distance method alone, the RoPE fields keep the scaling that the checkpoint ships with
    specs = {rope.geometry.layer_type: rope.spec for rope in settings.ropes}
    written = {label: replace(rope, spec=rope.spec.frequency or specs[label]) for label, rope in scaled.items()}
    of_scaling = plan_warnings.of_scaling(settings, scaled, target, keeps, state.before)
    of_writing = plan_warnings.of_writing(checkpoint, config, rope, written_length)
    plan = PatchPlan(
        source=checkpoint,
        spec=spec,
        positions=Positions(ropes, rope, original, target),
        written=written,
        remapping=SavedRemapping.of(scaled.values()),
        original=config,
        settings=settings,
        max_position_embeddings=written_length,
        findings=(*findings, *of_scaling, *of_writing),
    )
    if not in_memory:
        _ = plan.config  # raises PatchError
    return plan


def _labels_to_scale(
    name: str, settings: RopeSettings, spec: ScalingSpec, layer_types: Sequence[str] | None
) -> tuple[str | None, ...]:
    present = [rope.geometry.layer_type for rope in settings.ropes]
    if layer_types is None:
        if spec.method.name not in LENGTH_ONLY and not any(rope.far for rope in settings.ropes):
            hint = f" To scale other layers, use --layer-types {','.join(map(str, present))}."
            raise PatchError(f"{name}: {no_effect(settings.layers, spec.method)}{'' if present == [None] else hint}")
        return far_layers(settings)
    unknown = [label for label in layer_types if label not in present]
    if unknown or not layer_types:
        known = "none, all layers share one" if present == [None] else ", ".join(map(str, present))
        raise PatchError(
            f"--layer-types {'has unknown ' + ', '.join(unknown) if unknown else 'is empty'}; layer types of {name} "
            f"with rotary positions of their own: {known}."
        )
    labels, far = tuple(label for label in present if label in layer_types), far_layers(settings)
    if spec.method.remaps and labels != far:
        raise PatchError(
            f"--layer-types is {', '.join(map(str, labels))}; distance methods require the layers that see the whole "
            f"context ({', '.join(map(str, far))}). Remove --layer-types."
        )
    return labels


def _beside_shipped(spec: ScalingSpec, shipped: ScalingSpec) -> ScalingSpec:
    """The scaling to write, given the one that the checkpoint ships with.

    The same method keeps the shipped numbers, unless the user sets others. An attention factor other than 1 belongs to
    the factor, and is kept only with it. Numbers beside a list belong to that list.
    """
    if spec.method.name == "none":
        return spec if shipped.method.name == "none" else shipped
    if spec.method.name == "unscaled":
        return replace(spec, method=find_method("none"))
    if spec.method != shipped.method or any(isinstance(value, list) for value in shipped.params.values()):
        return spec
    belongs = shipped.params.get("attention_factor") != 1 and spec.factor != shipped.factor
    left_out = {"attention_factor"} if belongs or {*MSCALE_PAIR} & {*spec.params} else set()
    left_out |= {*MSCALE_PAIR} if "attention_factor" in spec.params else set()
    kept = {key: value for key, value in shipped.params.items() if key not in left_out}
    return replace(spec, params={**kept, **spec.params})


def _with_softmax_scale(spec: ScalingSpec, shipped: ScalingSpec) -> ScalingSpec:
    """Keep DeepSeek's mscale pair in a new YaRN, so that logits are scaled as in training.

    Other methods do not get it, because the pair would still multiply the softmax scale.
    """
    frequency = spec.method.frequency or spec.method
    if frequency.rope_type is None and MSCALE_PAIR[0] in spec.params:
        raise MethodError(f"{spec.method}: mscale is only possible with yarn alone or abf+yarn. Set attention_factor.")
    written_as_yarn = frequency.rope_type == "yarn" and MSCALE_PAIR[0] in frequency.signature
    if not written_as_yarn or any(key in spec.params for key in (*MSCALE_PAIR, "attention_factor")):
        return spec
    pair = {key: shipped.params[key] for key in MSCALE_PAIR if key in shipped.params}
    return replace(spec, params={**spec.params, **pair})


def _refuse_unknown_original(state: CheckpointState) -> None:
    """Raise PatchError if config.json alone does not show what a patch changed: the base, or the attention."""
    edited, saved = state.edited, state.saved_remapping
    if edited and (saved or {"ntk", "abf"} & set(edited.method.split("+"))):
        raise PatchError(
            f"{state.checkpoint.name} was patched with {edited.method}, and its config.json was edited afterwards "
            f"({', '.join(edited.edited)}), so the original is unknown. Undo the edit, or patch the "
            "original checkpoint."
        )
    if saved:
        raise PatchError(
            f"{state.checkpoint.name} was patched with {saved.method}, and has no ropecli.yaml with the original "
            "config.json. Patch the original checkpoint."
        )
