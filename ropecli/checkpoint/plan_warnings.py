"""Findings about planned patches. Some also apply to a checkpoint that is not patched."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ropecli.checkpoint.opening import Checkpoint
from ropecli.config.findings import Finding
from ropecli.config.layers import limit_of_far
from ropecli.config.settings import RopeSettings
from ropecli.scaling.spec import ScaledRope, varies_with_length


def of_scaling(
    settings: RopeSettings, scaled: Mapping[str | None, ScaledRope], target: int, keeps: bool, before: RopeSettings
) -> Iterator[Finding]:
    """Findings about a scaled model, on disk or in memory.

    target: the target length, tokens. keeps: whether the scaling is the one that the checkpoint ships with. before: the
    settings without --original-length.
    """
    rope = next(iter(scaled.values()))
    spec = rope.spec
    if keeps:
        trained = settings.context_length
        kept = f"the shipped {spec.method} ×{spec.factor:g} is kept: the model was not trained beyond {trained} tokens."
        if target > trained:
            yield Finding("kept-scaling", kept)
        return
    if spec.method.uses_factor:
        yield from beyond_scaling(rope, target)
    if target < (context := min(settings.context_length, before.context_length)):
        message = f"this shortens the context: the checkpoint reads {context} tokens, the patch {target}. To keep "
        yield Finding("shorter-context", f"{message}{context}, use --target-length {context}.")
    yield from _of_remapping(rope, target)
    yield from _of_frequencies(settings, rope)
    if before.overruled_by is None:  # else nobody trained with it
        yield from _of_shipped_scaling(settings, scaled)
    yield from _of_layers(settings, scaled)


def of_writing(
    checkpoint: Checkpoint, config: dict[str, Any], rope: ScaledRope, max_position_embeddings: int
) -> Iterator[Finding]:
    """Findings only about a patch on disk. config: before the patch. max_position_embeddings: to write, tokens."""
    method = rope.spec.method
    if rope.remapping is not None:
        message = (
            f"{method} uses ropecli's attention: transformers can load the checkpoint only after "
            "`import ropecli.attention`, and vLLM, SGLang and llama.cpp do not support it. save_pretrained writes the "
            "loaded model with standard attention."
        )
        yield Finding("own-attention", message)
        code = config.get("auto_map")
        if isinstance(code, dict) and any(key.startswith("AutoModel") for key in code):
            message = f"config.json has custom code (auto_map): with trust_remote_code=True it may ignore {method}. "
            yield Finding("custom-code", f"{message}Load it without; only that was verified.")
    if method.rope_type == "dynamic":
        message = f"max_position_embeddings stays at {max_position_embeddings}, the pretraining length of dynamic NTK."
        yield Finding("dynamic-length", message)
    if rope.rope_theta != rope.geometry.rope_theta:
        message = "config.json has only the new base; the pretrained one is in ropecli.yaml. Keep it with the weights."
        yield Finding("base-in-record", message)
    if warning := checkpoint.skip_warning:
        yield Finding("mistral-format", warning)


def beyond_scaling(rope: ScaledRope, target: int) -> Iterator[Finding]:
    """target: tokens that the model is to read."""
    method, original = rope.spec.method, rope.geometry.original_max_position_embeddings
    if rope.scaled_length < target:
        message = (
            f"{method} ×{rope.spec.factor:g} reaches {rope.scaled_length} tokens; {target} tokens require factor "
            f"{target / original:g} (pretraining length {original})."
        )
        yield Finding("context-beyond-scaling", message)


def switches(rope: ScaledRope) -> Iterator[Finding]:
    if varies_with_length(rope):
        message = (
            f"{rope.spec.method} has different frequencies for short and long inputs here. In transformers, batches of "
            "mixed lengths, chunked prefill, and a KV cache that grows past the pretraining length are inexact."
        )
        yield Finding("switches-with-length", message)


def _of_remapping(rope: ScaledRope, target: int) -> Iterator[Finding]:
    extends = (rope.spec.method.distance or rope.spec.method).uses_factor
    if rope.remapping is None or target > rope.remapping.pretrained or not extends:
        return
    if rope.spec.frequency is not None:
        reads, advice = f"{rope.spec.frequency.method} already reaches", "a smaller frequency_factor"
    else:
        factor = rope.remapping.pretrained / rope.geometry.original_max_position_embeddings
        reads, advice = "the checkpoint as shipped reads", f"--factor above {factor:g}"
    message = f"{reads} {rope.remapping.pretrained} tokens; target {target} does not extend it. Use {advice}."
    yield Finding("not-extended", message)


def _of_frequencies(settings: RopeSettings, rope: ScaledRope) -> Iterator[Finding]:
    spec = rope.spec
    unchanged = spec.factor > 1 and rope.remapping is None and np.array_equal(rope.inv_freq, rope.geometry.inv_freq())
    if unchanged:
        what = "with these parameters does not change any frequency"
        if spec.method.name == "none":
            what = "does not scale: the model was not trained on positions beyond the pretraining length"
        yield Finding("no-scaling", f"method {spec.method} {what}.")
    yield from switches(rope)
    shipped = any("mscale_all_dim" in rope.spec.params for rope in settings.ropes)
    if "mscale_all_dim" in spec.params and not shipped and not settings.family.reads_mscale_all_dim:
        message = (
            f"{settings.family.model_type} does not multiply its softmax scale by mscale_all_dim, so this part of the "
            "attention factor is lost. Remove mscale and mscale_all_dim; yarn then scales only cos and sin."
        )
        yield Finding("lost-attention-factor", message)


def _of_shipped_scaling(settings: RopeSettings, scaled: Mapping[str | None, ScaledRope]) -> Iterator[Finding]:
    """A finding if the patch replaces the scaling that the checkpoint ships with."""
    frequency = next(iter(scaled.values())).spec.frequency
    for rope in settings.ropes:
        shipped = rope.spec
        if frequency is None or rope.geometry.layer_type not in scaled or shipped.method.name == "none":
            continue
        if frequency.method != shipped.method:
            new_method = "unscaled" if frequency.method.name == "none" else frequency.method
            message = (
                f"{new_method} replaces the shipped {shipped.method} ×{shipped.factor:g}, with which the model "
                "was trained. To keep it and only raise the context length, use --method none."
            )
            yield Finding("replaces-shipped", message)
            return
        new = scaled[rope.geometry.layer_type].attention_factor
        if frequency.factor != shipped.factor and shipped.params.get("attention_factor", new) != new:
            message = (
                f"the attention factor is {new:g}, that of factor {frequency.factor:g}; the checkpoint ships with "
                f"--set attention_factor={shipped.params['attention_factor']} for factor {shipped.factor:g}."
            )
            yield Finding("replaces-attention-factor", message)
            return


def _of_layers(settings: RopeSettings, scaled: Mapping[str | None, ScaledRope]) -> Iterator[Finding]:
    method = next(iter(scaled.values())).spec.method
    near = [rope.geometry.layer_type for rope in settings.ropes if rope.geometry.layer_type in scaled and not rope.far]
    if near and method.name != "none":
        message = f"layers of type {', '.join(map(str, near))} only see nearby tokens; scaling them reduces resolution."
        yield Finding("near-layers", message)
    if limit := limit_of_far(settings.layers):
        yield Finding("layers", f"{limit}, also after the patch.")
