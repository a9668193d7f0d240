"""What a patch would write, worked out without writing: PatchPlan. Loads neither torch nor transformers."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropecli.checkpoint.dialects import RopeSettings, read_settings, sees_whole_context
from ropecli.checkpoint.encoding import native_parameters, write_settings
from ropecli.checkpoint.provenance import Change, Provenance, diff, read_provenance, unreadable
from ropecli.checkpoint.reading import Checkpoint, section_of
from ropecli.errors import MethodError, PatchError
from ropecli.rope import ScaledRope, ScalingSpec
from ropecli.scaling.registry import get_method, scale, varies_with_length

_LONGEST = 10**12


@dataclass(frozen=True)
class PatchPlan:
    """What would be written: printable, diffable, free to make.

    ropes: by layer type (None where all share one), untouched ones included. changes: against the config as
    it stands; original: the config before any patch. window: max_position_embeddings to write, tokens.
    settings_warnings: what the source leaves open; warnings: these and what the patch itself gives rise to.
    """

    source: Checkpoint
    spec: ScalingSpec
    ropes: dict[str | None, ScaledRope]
    original: dict[str, Any]
    config: dict[str, Any]
    changes: tuple[Change, ...]
    window: int
    target_length: int
    settings_warnings: tuple[str, ...]
    warnings: tuple[str, ...]


def original_settings(
    checkpoint: Checkpoint, original_length: int | None = None
) -> tuple[dict[str, Any], RopeSettings]:
    """The config before any patch of ours, and its RoPE settings. Raises PatchError where it is not known for sure."""
    provenance = read_provenance(checkpoint)
    if provenance is None or provenance.edited:
        settings = read_settings(checkpoint.config, original_length)
        _refuse_unknown_base(checkpoint.name, provenance)
        return copy.deepcopy(checkpoint.config), replace(settings, warnings=_edited(provenance) + settings.warnings)
    return provenance.original, read_settings(provenance.original, original_length or provenance.original_length)


def effective_ropes(checkpoint: Checkpoint) -> tuple[dict[str | None, ScaledRope], RopeSettings]:
    """The ropes in effect, by layer type, and the settings that config.json shows.

    Where ropecli.yaml fits the config, the pretrained geometry and the method are known from it; a new base
    alone would not show what it was before.
    """
    shown = read_settings(checkpoint.config)
    provenance = read_provenance(checkpoint)
    if provenance is None or provenance.edited:
        ropes = {rope.geometry.layer_type: scale(rope.geometry, rope.spec) for rope in shown.ropes}
        return ropes, replace(shown, warnings=_edited(provenance) + shown.warnings)
    before = read_settings(provenance.original, provenance.original_length)
    try:
        return _scale_layers(before, provenance.spec), replace(shown, warnings=before.warnings)
    except MethodError as error:
        raise unreadable(checkpoint.folder, error) from error


def _edited(provenance: Provenance | None) -> tuple[str, ...]:
    if provenance is None:
        return ()
    keys = ", ".join(provenance.edited)
    return (f"config.json was edited since ropecli.yaml was written ({keys}), so that note is not gone by.",)


def make_plan(
    checkpoint: Checkpoint,
    spec: ScalingSpec,
    *,
    target_length: int | None = None,
    original_length: int | None = None,
) -> PatchPlan:
    """Plans to patch `checkpoint`.

    target_length: tokens; then the factor follows from the true original window, whatever spec.factor says.
    original_length: corrects a config that lies about that window. Raises MethodError for a factor or target
    out of range, PatchError for what stock transformers cannot express.
    """
    get_method(spec.method)
    for name, length in (("--target-length", target_length), ("--original-length", original_length)):
        if length is not None and length > _LONGEST:
            raise MethodError(f"{name} is beyond any use; it must be at most {_LONGEST} tokens.")
    config, settings = original_settings(checkpoint, original_length)
    windows = [
        rope.geometry.original_max_position_embeddings
        for rope in settings.ropes
        if sees_whole_context(rope.geometry.layer_type)
    ]
    if not windows:
        raise PatchError(f"{checkpoint.name}: no layer that sees the whole context has rotary positions.")
    window = windows[0]
    if target_length is not None:
        if target_length < window:
            raise MethodError(
                f"The target length {target_length} is below the pretraining window, {window}. "
                "Give at least that, or correct the window with --original-length."
            )
        spec = ScalingSpec(spec.method, target_length / window, spec.params)
    if spec.factor > 1e6:
        raise MethodError(f"The factor {spec.factor:g} is beyond any use; it must be at most 1000000.")
    _refuse_softmax_scale(config)
    ropes = _scale_layers(settings, spec)
    target = target_length or round(window * spec.factor)
    warnings = []
    # transformers takes max_position_embeddings for dynamic NTK's original window: raised, it would switch it off.
    keeps_window = get_method(spec.method).rope_type == "dynamic"
    written_window = window if keeps_window else target
    if keeps_window:
        warnings.append(
            f"max_position_embeddings stays at {window}: stock readers take it for dynamic NTK's pretraining window."
        )
    scaled = {label: rope for label, rope in ropes.items() if sees_whole_context(label)}
    warnings += _warn(config, spec, scaled, target)
    patched = copy.deepcopy(config)
    write_settings(patched, scaled, written_window)
    return PatchPlan(
        source=checkpoint,
        spec=spec,
        ropes=ropes,
        original=config,
        config=patched,
        changes=tuple(diff(checkpoint.config, patched)),
        window=written_window,
        target_length=target,
        settings_warnings=settings.warnings,
        warnings=(*settings.warnings, *warnings),
    )


def _scale_layers(settings: RopeSettings, spec: ScalingSpec) -> dict[str | None, ScaledRope]:
    """Scales the layers that see the whole context; the others keep what they have."""
    ropes = {}
    for rope in settings.ropes:
        label = rope.geometry.layer_type
        ropes[label] = scale(rope.geometry, spec if sees_whole_context(label) else rope.spec)
    return ropes


def _refuse_unknown_base(name: str, provenance: Provenance | None) -> None:
    if provenance and provenance.spec.method in ("ntk", "abf"):
        raise PatchError(
            f"{name} was patched with {provenance.spec.method}, which is another base, and its config.json "
            f"was edited since ({', '.join(provenance.edited)}): the pretrained base is not known for sure. Undo the "
            "edit; or set rope_theta to the pretrained base and remove ropecli.yaml."
        )


def _refuse_softmax_scale(config: dict[str, Any]) -> None:
    section = section_of(config)
    parameters = {**(section.get("rope_parameters") or {}), **(section.get("rope_scaling") or {})}
    if parameters.get("mscale_all_dim"):
        raise PatchError(
            "config.json carries mscale_all_dim, which also multiplies the softmax scale (DeepSeek); "
            "patching such a model is not supported yet, and doing it halfway would be silent."
        )


def _warn(config: dict[str, Any], spec: ScalingSpec, scaled: dict[str | None, ScaledRope], target: int) -> list[str]:
    warnings = []
    rope = next(iter(scaled.values()))
    if spec.method == "none" and spec.factor > 1:
        warnings.append("none scales nothing: positions beyond the pretraining window stay unseen by the model.")
    if spec.method != "none" and spec.factor > 1 and np.array_equal(rope.inv_freq, rope.geometry.inv_freq()):
        warnings.append(f"{spec.method} with these parameters leaves every frequency as it was.")
    if rope.rope_theta < rope.geometry.rope_theta:
        warnings.append(
            f"the new base, {rope.rope_theta:g}, is below the pretrained one, {rope.geometry.rope_theta:g}: "
            "pairs turn faster than they did, which extends nothing."
        )
    if rope.rope_theta != rope.geometry.rope_theta and native_parameters(rope)["rope_type"] == "default":
        warnings.append(
            "the new base says nothing of the window it came from; ropecli.yaml does: keep it beside the weights."
        )
    if varies_with_length(rope.geometry, spec):
        warnings.append(
            f"{spec.method} switches frequencies with the length: a KV cache that grows past the pretraining "
            "window, and prompts read in chunks, differ from one pass."
        )
    section = section_of(config)
    sliding = section.get("sliding_window")
    if None in scaled and isinstance(sliding, int) and sliding < target and _all_layers_slide(section):
        warnings.append(f"sliding_window is {sliding}: no layer attends further back, whatever the positions say.")
    return warnings


def _all_layers_slide(section: dict[str, Any]) -> bool:
    layer_types = section.get("layer_types")
    if isinstance(layer_types, list) and any(sees_whole_context(str(label)) for label in layer_types):
        return False
    return bool(section.get("use_sliding_window", True))
