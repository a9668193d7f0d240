"""Writes a scaled rope into a config in both dialects.

With only one dialect, the other transformers release (4 or 5) can silently read a wrong base.
"""

import math
from itertools import cycle
from typing import Any

import numpy as np

from ropecli.config.dialects import (
    KEPT_KEYS,
    LAYER_THETAS,
    LOCAL_THETA,
    MAX_POSITIONS,
    NATIVE_KEYS,
    ORIGINAL_LENGTH,
    QUERY_SCALE,
    THETA_KEYS,
    Parameters,
    rope_type_of,
)
from ropecli.config.families import COMMON_NAMES, MSCALES, Family, ignores_top_level
from ropecli.config.fields import head_dim, section_of
from ropecli.config.layers import layer_labels
from ropecli.config.settings import RopeSettings, rotary_share
from ropecli.errors import PatchError
from ropecli.scaling.longrope import longrope_attention_factor
from ropecli.scaling.spec import ScaledRope, varies_with_length
from ropecli.scaling.yarn import yarn_attention_factor

_REPLACED = {"rope_type", "type", "rope_theta", *sum(NATIVE_KEYS.values(), ())} - {"partial_rotary_factor"}
_FACTOR_OF_ZERO_FREQUENCY = 1e30
"""The factor for a frequency of zero: JSON has no infinity, and float32 ends at 3e38."""


def _native_parameters(scaled: ScaledRope, family: Family, context_length: int) -> Parameters:
    """The `rope_parameters` with which stock transformers computes these frequencies.

    If the method has no rope_type, or the model type does not support it: longrope with equal short and long factors,
    which can express any static frequencies. context_length: max_position_embeddings, tokens. Raises PatchError.
    """
    rope_type, original = _rope_type(scaled, family), scaled.geometry.original_max_position_embeddings
    values: Parameters = {"factor": scaled.spec.factor, ORIGINAL_LENGTH: original}
    if rope_type != "longrope" or scaled.spec.method.name == "longrope":
        values |= _own_values(scaled, rope_type, family)
    else:
        with np.errstate(divide="ignore"):
            factors = scaled.geometry.powers(scaled.rope_theta) / scaled.inv_freq
        factors = np.minimum(factors, _FACTOR_OF_ZERO_FREQUENCY).tolist()
        values |= {"short_factor": factors, "long_factor": factors, "attention_factor": scaled.attention_factor}
    if scaled.spec.method.rope_type == "default":
        del values["factor"]  # proportional would divide by it once more
    if rope_type == "longrope":
        # what a reader computes from the two lengths without factor and attention_factor
        usual = longrope_attention_factor(context_length / original, original)
        if family.reads_mscales or not math.isclose(scaled.attention_factor, usual):
            values |= dict.fromkeys(MSCALES, scaled.attention_factor)
    known = {key: values[key] for key in NATIVE_KEYS[rope_type] if key in values}
    return {"rope_type": rope_type, "rope_theta": scaled.rope_theta, **known}


def _rope_type(scaled: ScaledRope, family: Family) -> str:
    method = scaled.spec.method
    honoured = family.rope_types or tuple(NATIVE_KEYS)
    if scaled.geometry.still_pairs:
        # `proportional` is the only native type with pairs that do not rotate
        if method.rope_type in ("default", "linear"):
            return "proportional"
        honoured = ("longrope",)
    if method.rope_type in honoured:
        return method.rope_type
    if varies_with_length(scaled):
        raise PatchError(
            f"{scaled.spec.method} depends on the current length, which config.json cannot express for this model. "
            f"It can only be used in memory: eval-ppl --methods {scaled.spec.method} --factors {scaled.spec.factor:g}, "
            f"or compare --methods {scaled.spec.method}."
        )
    if "longrope" not in honoured:
        raise PatchError(
            f"{family.model_type} supports only rope_type {', '.join(honoured)}, which cannot express "
            f"{scaled.spec.method}. Use abf or ntk."
        )
    return "longrope"


def _own_values(scaled: ScaledRope, rope_type: str, family: Family) -> Parameters:
    """The method's parameters, and its attention factor."""
    values: Parameters = {**scaled.spec.params}
    if rope_type == "longrope" and (still := scaled.geometry.still_pairs):
        for key in ("short_factor", "long_factor"):  # a stock reader would rotate these pairs
            values[key] = [*values[key][:-still], *[_FACTOR_OF_ZERO_FREQUENCY] * still]
    # Write these two only if they differ from the default: not every engine supports them.
    if values.get("truncate") is True:
        del values["truncate"]
    usual = "mscale" in values or math.isclose(scaled.attention_factor, yarn_attention_factor(scaled.spec.factor))
    if rope_type == "longrope" or family.yarn_keeps_logits or not usual:
        values["attention_factor"] = scaled.attention_factor
    return values


def write_settings(
    config: dict[str, Any], settings: RopeSettings, scaled: dict[str | None, ScaledRope], context_length: int
) -> None:
    """Write the scaled ropes in both dialects, and the context length, tokens, into `config`. Raises PatchError.

    settings: of this config; they have the parameters that scaling does not change.
    """
    section, family, before = section_of(config), settings.family, settings.parameters
    if ignores_top_level(config):
        raise PatchError(
            f"config.json has no text_config, and transformers reads the language model of {config['model_type']} only "
            "from there, so a patch would have no effect. Patch a conversion of the model to transformers' format."
        )
    written = {label: written_parameters(section, settings, rope, context_length) for label, rope in scaled.items()}
    _refuse_longrope_of_mixed_layers(section, {head_dim(section, family, label) for label in before}, written)
    main = next(iter(written.values()))
    if None in written:
        section["rope_parameters"] = main
        _write_legacy(section, family, main)
        if family.own_names is not None:
            theta_key, partial_key = family.own_names
            section[theta_key] = main["rope_theta"]
            if "partial_rotary_factor" in main:
                section[partial_key] = main["partial_rotary_factor"]
            if section["rope_scaling"] is not None:
                section["rope_scaling"] = {**main, **section["rope_scaling"]}
    else:
        nest = {label: written.get(label, parameters) for label, parameters in before.items()}
        section["rope_parameters"] = nest
        _write_legacy_of_nest(section, family, nest, main)
    write_context_length(section, family, context_length)
    write_head_dim(section, family)


def write_head_dim(section: dict[str, Any], family: Family) -> None:
    """Write a head_dim that is null: transformers 5 divides by it in yarn, longrope and dynamic."""
    if section.get("head_dim") is None and ("head_dim" in section or family.null_head_dim):
        section["head_dim"] = head_dim(section, family)


def write_context_length(section: dict[str, Any], family: Family, context_length: int) -> None:
    """Write the context length, tokens, to the key that the model type reads and to all its other names present."""
    names = family.names_of(MAX_POSITIONS)
    read = [name for name in names if name in section] or names[:1]
    common = [name for name in COMMON_NAMES[MAX_POSITIONS] if name in section]  # vLLM uses the smallest of these
    section |= dict.fromkeys([*read, *common], context_length)


def _refuse_longrope_of_mixed_layers(
    section: dict[str, Any], heads: set[int], written: dict[str | None, Parameters]
) -> None:
    differing = section.get("per_layer_config")
    layers = differing.values() if isinstance(differing, dict) else ()
    keys = set().union(*(layer for layer in layers if isinstance(layer, dict)))
    mixed = len(heads) > 1 or keys & {"head_dim", "num_attention_heads"} or "attention_other_setting" in section
    if mixed and any(parameters["rope_type"] == "longrope" for parameters in written.values()):
        raise PatchError(
            "This method is written as longrope, which transformers does not support if layers differ in head_dim or "
            "num_attention_heads. Use linear, abf or ntk."
        )


def written_parameters(
    section: dict[str, Any], settings: RopeSettings, rope: ScaledRope, context_length: int
) -> Parameters:
    """`rope_parameters` with which stock transformers computes a scaled rope, and keys that are unrelated to scaling.

    section, settings: of config.json, with the keys to keep, such as partial_rotary_factor. context_length: tokens.
    Raises PatchError.
    """
    family, label = settings.family, rope.geometry.layer_type
    parameters, before = _native_parameters(rope, family, context_length), settings.parameters[label] or {}
    # for unknown model types, keep all other keys: the checkpoint's code may read them
    kept = {
        key: value
        for key, value in before.items()
        if key not in _REPLACED and (key in KEPT_KEYS or isinstance(value, dict) or not family.known)
    }
    if (share := rotary_share(section, family, before, label)) is not None:
        kept["partial_rotary_factor"] = share
    if rope.geometry.still_pairs and parameters["rope_type"] == "longrope":
        kept["partial_rotary_factor"] = 1.0  # the longrope factors encode which pairs do not rotate
    if QUERY_SCALE in kept:
        kept[ORIGINAL_LENGTH] = rope.geometry.original_max_position_embeddings
    if MAX_POSITIONS in kept:  # Ministral's config has a copy here
        kept[MAX_POSITIONS] = context_length
    return {**parameters, **kept}


def _write_legacy(section: dict[str, Any], family: Family, main: Parameters) -> None:
    for key in THETA_KEYS:
        if key in section or key == "rope_theta":
            section[key] = main["rope_theta"]
    if isinstance(section.get(LAYER_THETAS), list):
        section[LAYER_THETAS] = [main["rope_theta"] if theta else theta for theta in section[LAYER_THETAS]]
    if "partial_rotary_factor" in main:
        section["partial_rotary_factor"] = main["partial_rotary_factor"]
    # always written: in transformers 5 a stale rope_scaling takes precedence over rope_parameters
    unscaled = main["rope_type"] == "default" and "mrope_section" not in main  # vLLM and transformers 4 read it there
    section["rope_scaling"] = None if unscaled else _legacy_scaling(main)
    if family.two_fields and main["rope_type"] in ("linear", "dynamic"):
        section["rope_scaling"] = {"type": main["rope_type"], "factor": float(main["factor"])}
    if main["rope_type"] == "longrope" and family.bare_longrope and MSCALES[0] not in main:
        # both transformers releases compute factor and attention_factor from the two lengths
        section["rope_scaling"] = {key: section["rope_scaling"][key] for key in ("type", "short_factor", "long_factor")}
    if main["rope_type"] == "longrope" or ORIGINAL_LENGTH in section:
        # transformers 4 reads longrope's pretraining length here; in transformers 5 it overrides rope_parameters
        original = main.get(ORIGINAL_LENGTH)
        if original is None:
            section.pop(ORIGINAL_LENGTH, None)
        else:
            section[ORIGINAL_LENGTH] = original


def _legacy_scaling(parameters: Parameters) -> Parameters:
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {**scaling, "type": rope_type_of(parameters)}


def _write_legacy_of_nest(
    section: dict[str, Any], family: Family, nest: dict[Any, Parameters | None], main: Parameters
) -> None:
    """Write the older dialect for parameters by layer type, only for model types that do not apply it to all layers."""
    if main.get("truncate") is False:
        section["rope_parameters"] = {**nest, "truncate": False}  # the only place where transformers 5 reads it
    local = next((value for label, value in nest.items() if value and not family.sees_whole_context(label)), None)
    if LOCAL_THETA in section or family.flat_means_full:
        # the flat fields apply to the layers that see the whole context
        far = next((value for label, value in nest.items() if value and family.sees_whole_context(label)), main)
        _write_legacy(section, family, {**far, "rope_type": rope_type_of(far)})
        if local is not None and (LOCAL_THETA in section or local["rope_theta"] != far["rope_theta"]):
            section[LOCAL_THETA] = local["rope_theta"]
        return
    # in transformers 5 rope_scaling replaces rope_parameters, even by null; engines read it where it was released
    if "rope_scaling" in section:
        scaled = {label: value for label, value in nest.items() if value and rope_type_of(value) != "default"}
        del section["rope_scaling"]
        if len(scaled) == 1 and tuple(scaled) == family.flat_scaling:
            section["rope_scaling"] = _legacy_scaling(*scaled.values())
    section.pop(ORIGINAL_LENGTH, None)  # transformers only reads those of the layer types
    for label, name in family.flat_bases.items():
        base, value = (nest.get(label) or {}).get("rope_theta"), section.get(name)
        if base is None or value is None:
            continue
        if isinstance(value, list):  # one per layer
            layers = zip(cycle(layer_labels(section, family)), value, strict=False)
            base = [base if layer == label else old for layer, old in layers]
        section[name] = base
