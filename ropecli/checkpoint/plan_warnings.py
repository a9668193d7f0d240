"""Warnings about a planned patch."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ropecli.config.settings import RopeSettings
from ropecli.scaling.scale import varies_with_length
from ropecli.scaling.spec import ScaledRope, ScalingSpec


def of_scaling(
    settings: RopeSettings,
    spec: ScalingSpec,
    scaled: Mapping[str | None, ScaledRope],
    target: int,
    keeps: bool,
) -> Iterator[str]:
    """Warnings for a scaled model, on disk or in memory.

    target: the target length, tokens. keeps: whether the scaling is the one that the checkpoint ships with.
    """
    rope = next(iter(scaled.values()))
    if keeps:
        trained = settings.context_length
        kept = f"the shipped {spec.method} ×{spec.factor:g} is kept: the model was not trained beyond {trained} tokens."
        if target > trained:
            yield kept
        return
    yield from _of_lengths(settings, rope, spec, target)
    yield from _of_remapping(rope, target)
    yield from _of_frequencies(settings, rope, spec)
    yield from _of_shipped_scaling(settings, spec, scaled)
    yield from _of_layers(settings, scaled, target)


def of_writing(
    config: dict[str, Any], spec: ScalingSpec, rope: ScaledRope, max_position_embeddings: int
) -> Iterator[str]:
    """Warnings only for a patch on disk. max_position_embeddings: the value to write, tokens."""
    if rope.remapping is not None:
        yield (
            f"{spec.method} uses ropecli's attention: transformers can load the checkpoint only after "
            "`import ropecli.attention`, and vLLM, SGLang and llama.cpp do not support it. save_pretrained writes the "
            "loaded model with standard attention."
        )
        code = config.get("auto_map")
        if isinstance(code, dict) and any(key.startswith("AutoModel") for key in code):
            yield (
                f"config.json has custom code (auto_map): with trust_remote_code=True it may ignore {spec.method}. "
                "Load it without; only that was verified."
            )
    if spec.method.rope_type == "dynamic":
        yield (
            f"max_position_embeddings stays at {max_position_embeddings}: stock readers use it as the pretraining "
            "length of dynamic NTK."
        )
    if rope.rope_theta != rope.geometry.rope_theta:
        yield (
            "config.json only has the new base; the pretrained base is in ropecli.yaml. Keep it next to the weights."
        )


def _of_lengths(settings: RopeSettings, rope: ScaledRope, spec: ScalingSpec, target: int) -> Iterator[str]:
    original, context = rope.geometry.original_max_position_embeddings, settings.context_length
    if spec.method.uses_factor and rope.scaled_length < target:
        yield (
            f"factor {spec.factor:g} reaches {rope.scaled_length} tokens; {target} tokens require factor "
            f"{target / original:g} (pretraining length {original})."
        )
    if target < context:
        yield (
            f"this shortens the context: the checkpoint reads {context} tokens, the patch {target}. To keep {context}, "
            f"use --target-length {context}."
        )


def _of_remapping(rope: ScaledRope, target: int) -> Iterator[str]:
    extends = (rope.spec.method.distance or rope.spec.method).uses_factor
    if rope.remapping is None or target > rope.remapping.pretrained or not extends:
        return
    if rope.spec.frequency is not None:
        yield (
            f"{rope.spec.frequency.method} already reaches {rope.remapping.pretrained} tokens; target {target} does "
            "not extend it. Use a smaller frequency_factor."
        )
    else:
        yield (
            f"the checkpoint reads {rope.remapping.pretrained} tokens as shipped; target {target} does not extend it. "
            f"Use --factor above {rope.remapping.pretrained / rope.geometry.original_max_position_embeddings:g}."
        )


def _of_frequencies(settings: RopeSettings, rope: ScaledRope, spec: ScalingSpec) -> Iterator[str]:
    geometry = rope.geometry
    if spec.method.name == "none" and spec.factor > 1:
        yield "method none does not scale: the model was not trained on positions beyond the pretraining length."
    elif spec.factor > 1 and rope.remapping is None and np.array_equal(rope.inv_freq, geometry.inv_freq()):
        yield f"{spec.method} with these parameters does not change any frequency."
    if rope.rope_theta < geometry.rope_theta:
        yield (
            f"the new base, {rope.rope_theta:g}, is below the pretrained one, {geometry.rope_theta:g}: "
            "pairs rotate faster, which does not extend the context."
        )
    if varies_with_length(rope):
        yield (
            f"{spec.method} changes frequencies with the length: a KV cache that grows past the pretraining length, "
            "and chunked prefill, differ from a single forward pass."
        )
    shipped = any("mscale_all_dim" in rope.spec.params for rope in settings.ropes)
    if "mscale_all_dim" in spec.params and not shipped and not settings.family.reads_mscale_all_dim:
        yield (
            f"{settings.family.model_type} does not multiply its softmax scale by mscale_all_dim, so this part of the "
            "attention factor is lost. Remove mscale and mscale_all_dim; yarn then scales only cos and sin."
        )


def _of_shipped_scaling(
    settings: RopeSettings, spec: ScalingSpec, scaled: Mapping[str | None, ScaledRope]
) -> Iterator[str]:
    """A warning if the patch replaces the scaling that the checkpoint ships with."""
    frequency = spec.frequency
    for rope in settings.ropes:
        shipped = rope.spec
        if frequency is None or rope.geometry.layer_type not in scaled or shipped.method.name == "none":
            continue
        if frequency.method != shipped.method:
            new_method = "unscaled" if frequency.method.name == "none" else frequency.method
            yield (
                f"{new_method} replaces the shipped {shipped.method} ×{shipped.factor:g}, with which the model "
                "was trained. To keep it and only raise the context length, use --method none."
            )
            return
        new = scaled[rope.geometry.layer_type].attention_factor
        if frequency.factor != shipped.factor and shipped.params.get("attention_factor", new) != new:
            yield (
                f"the attention factor is {new:g}, that of factor {frequency.factor:g}; the checkpoint ships with "
                f"--set attention_factor={shipped.params['attention_factor']} for factor {shipped.factor:g}."
            )
            return


def _of_layers(settings: RopeSettings, scaled: Mapping[str | None, ScaledRope], target: int) -> Iterator[str]:
    window = settings.widest_window
    if None in scaled and window is not None and window < target:
        yield f"sliding_window is {window}: no layer attends further back, even after scaling."
    method = next(iter(scaled.values())).spec.method
    near = [rope.geometry.layer_type for rope in settings.ropes if rope.geometry.layer_type in scaled and not rope.far]
    if near and method.name != "none":
        yield f"layers of type {', '.join(map(str, near))} only see nearby tokens; scaling them reduces resolution."
    far = [layer for layer in settings.layers if layer.far]
    still = sum(layer.rotates is False for layer in far)
    if method.name != "none" and 0 < still < len(far):
        of = f"{still} of {len(far)} layers that see the whole context"
        yield f"{of} have no rotary positions; {method} does not change them."
