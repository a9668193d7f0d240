"""What a planned patch gives rise to that its user should know. Warns, and never refuses."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ropecli.config.families import Family
from ropecli.config.fields import section_of
from ropecli.config.settings import RopeSettings
from ropecli.scaling.scale import varies_with_length
from ropecli.scaling.spec import ScaledRope, ScalingSpec

_SET_THE_LENGTH_ALONE = ("none", "abf", "p-rope", "nope", "custom", "longrope", "dynamic-yarn")


def of_scaling(
    config: dict[str, Any],
    settings: RopeSettings,
    spec: ScalingSpec,
    scaled: Mapping[str | None, ScaledRope],
    target: int,
) -> list[str]:
    """What holds wherever the model is scaled, on disk or in memory. target: the length to reach, tokens."""
    rope = next(iter(scaled.values()))
    section = section_of(config)
    return [
        *_of_factor(rope, spec, target),
        *_of_shipped_length(settings, scaled, target),
        *_of_remapping(rope, target),
        *_of_frequencies(rope, spec),
        *_of_softmax_scale(settings, spec),
        *_of_shipped_parameters(settings, spec, scaled),
        *_of_layers(section, settings, scaled, target),
    ]


def of_writing(config: dict[str, Any], spec: ScalingSpec, rope: ScaledRope, max_position_embeddings: int) -> list[str]:
    """What holds for a written patch alone. max_position_embeddings: to write, tokens."""
    warnings = []
    if rope.remapping is not None:
        warnings.append(
            f"{spec.method} is attention of ropecli's: transformers runs it after `import ropecli.attention`, and "
            "refuses to load it otherwise; vLLM, SGLang and llama.cpp do not have it. What save_pretrained writes of "
            "the loaded model attends plainly again."
        )
        code = config.get("auto_map")
        if isinstance(code, dict) and any(key.startswith("AutoModel") for key in code):
            warnings.append(
                "config.json names code of its own (auto_map), which attends as it likes: with trust_remote_code=True "
                f"{spec.method} may be passed over in silence. Load it without; that is what was proved."
            )
    if spec.method.rope_type == "dynamic":
        warnings.append(
            f"max_position_embeddings stays at {max_position_embeddings}: stock readers take it for dynamic NTK's "
            "pretraining length."
        )
    if rope.rope_theta != rope.geometry.rope_theta:
        warnings.append(
            "the new base says nothing of the one it came from; ropecli.yaml does: keep it beside the weights."
        )
    return warnings


def _of_factor(rope: ScaledRope, spec: ScalingSpec, target: int) -> list[str]:
    original = rope.geometry.original_max_position_embeddings
    if spec.method.name in _SET_THE_LENGTH_ALONE or rope.scaled_length >= target:
        return []
    return [
        f"a factor of {spec.factor:g} reaches {rope.scaled_length} tokens; {target} need "
        f"{target / original:g}, the target over the pretraining length of {original}."
    ]


def _of_shipped_length(settings: RopeSettings, scaled: Mapping[str | None, ScaledRope], target: int) -> list[str]:
    """A patch that shortens the context of a checkpoint that ships scaled."""
    shipped = settings.max_position_embeddings
    for rope in settings.ropes:
        if rope.geometry.layer_type in scaled and rope.spec.method.name != "none" and target < shipped:
            return [
                f"this shortens the context: the checkpoint ships with {rope.spec.method} and reads {shipped} tokens, "
                f"the patch reads {target}. To keep {shipped}, give --target-length {shipped}."
            ]
    return []


def _of_remapping(rope: ScaledRope, target: int) -> list[str]:
    if rope.remapping is None or target > rope.remapping.pretrained:
        return []
    return [
        f"the checkpoint reads {rope.remapping.pretrained} tokens as it came; a target of {target} extends nothing. "
        f"Give a --factor above {rope.remapping.pretrained / rope.geometry.original_max_position_embeddings:g}."
    ]


def _of_frequencies(rope: ScaledRope, spec: ScalingSpec) -> list[str]:
    warnings = []
    geometry = rope.geometry
    if spec.method.name == "none" and spec.factor > 1:
        warnings.append("none scales nothing: positions beyond the pretraining length stay unseen by the model.")
    elif spec.factor > 1 and rope.remapping is None and np.array_equal(rope.inv_freq, geometry.inv_freq()):
        warnings.append(f"{spec.method} with these parameters leaves every frequency as it was.")
    if rope.rope_theta < geometry.rope_theta:
        warnings.append(
            f"the new base, {rope.rope_theta:g}, is below the pretrained one, {geometry.rope_theta:g}: "
            "pairs turn faster than they did, which extends nothing."
        )
    if spec.method.name != "nope" and not rope.inv_freq.any():
        warnings.append(f"{spec.method} with these parameters leaves no pair that turns; that is nope.")
    if varies_with_length(rope):
        warnings.append(
            f"{spec.method} switches frequencies with the length: a KV cache that grows past the pretraining "
            "length, and prompts read in chunks, differ from one pass."
        )
    return warnings


def _of_softmax_scale(settings: RopeSettings, spec: ScalingSpec) -> list[str]:
    own = any("mscale_all_dim" in rope.spec.params for rope in settings.ropes)
    if "mscale_all_dim" not in spec.params or own or settings.family.reads_mscale_all_dim:
        return []
    return [
        f"{settings.family.model_type} does not multiply its softmax scale by mscale_all_dim, so that its share of the "
        "attention factor is lost. Leave the pair out: then yarn puts all of it into cos and sin."
    ]


def _of_shipped_parameters(
    settings: RopeSettings, spec: ScalingSpec, scaled: Mapping[str | None, ScaledRope]
) -> list[str]:
    """Where the checkpoint comes with the same method and other parameters, which its training knew."""
    for rope in settings.ropes:
        new = scaled.get(rope.geometry.layer_type)
        if new is None or new.spec.method != rope.spec.method:
            continue
        shipped = {
            key: value
            for key, value in rope.spec.params.items()
            if key not in spec.params and not isinstance(value, list) and value != new.spec.params.get(key)
        }
        if shipped:
            kept = " ".join(f"--set {key}={str(value).lower()}" for key, value in shipped.items())
            return [f"the checkpoint comes with {rope.spec.method} of other parameters; {kept} keeps them."]
    return []


def _of_layers(
    section: dict[str, Any], settings: RopeSettings, scaled: Mapping[str | None, ScaledRope], target: int
) -> list[str]:
    warnings = []
    sliding = moot_sliding_window(section, settings.family)
    if None in scaled and sliding is not None and sliding < target:
        warnings.append(f"sliding_window is {sliding}: no layer attends further back, whatever the positions say.")
    near = [rope.geometry.layer_type for rope in settings.ropes if rope.geometry.layer_type in scaled and not rope.far]
    if near:
        warnings.append(f"layers of type {', '.join(map(str, near))} look back a short way; scaling blurs it.")
    if None in scaled and settings.family.only_sliding_turn and mixes_layers(section, settings.family):
        warnings.append(
            f"in {settings.family.model_type} the layers that see the whole context carry no positions: only the "
            "sliding ones turn, and scaling them blurs the near past. --method none raises the context length alone."
        )
    return warnings


def moot_sliding_window(section: dict[str, Any], family: Family) -> int | None:
    """The sliding window, tokens, where every layer has one; None where some layer sees everything, or may."""
    sliding = section.get("sliding_window")
    if isinstance(sliding, bool) or not isinstance(sliding, int) or not section.get("use_sliding_window", True):
        return None
    labels = section.get("layer_types")
    if isinstance(labels, list) and labels:
        return None if any(family.sees_whole_context(str(label)) for label in labels) else sliding
    # config.json from before layer_types: most types mix their layers by a rule of their own
    return sliding if family.slides_throughout else None


def mixes_layers(section: dict[str, Any], family: Family) -> bool:
    """Whether some layers slide and others see the whole context, where the type mixes them at all."""
    labels = section.get("layer_types")
    if isinstance(labels, list) and labels:
        return len({family.sees_whole_context(str(label)) for label in labels}) > 1
    return "sliding_window" not in section or section["sliding_window"] is not None
