"""Writes a scaled rope into a config in both dialects, consistently: a transformers 5 that finds only the older
fields, or a transformers 4 that finds only the newer, otherwise reads a wrong base in silence.
"""

import math
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
    parameters_by_layer_type,
    rope_type_of,
)
from ropecli.config.families import COMMON_NAMES, MSCALES, Family, family_of
from ropecli.config.fields import head_dim, section_of
from ropecli.config.settings import rotary_share
from ropecli.errors import PatchError
from ropecli.scaling.longrope import longrope_attention_factor
from ropecli.scaling.scale import varies_with_length
from ropecli.scaling.spec import ScaledRope
from ropecli.scaling.yarn import yarn_attention_factor

_REPLACED = {"rope_type", "type", "rope_theta", *sum(NATIVE_KEYS.values(), ())} - {"partial_rotary_factor"}
_STANDS_FOR_ZERO = 1e30
"""A factor that leaves no frequency: strict JSON has no infinity, and float32 ends at 3e38."""


def native_parameters(
    scaled: ScaledRope, family: Family | None = None, context_length: int | None = None
) -> Parameters:
    """The `rope_parameters` dict by which stock transformers makes these frequencies.

    Where the method has no rope_type of its own, or the family does not honour it: longrope with the same factors
    for short and long, which expresses any static frequencies. context_length: max_position_embeddings beside it,
    tokens; the pretraining length × the factor unless given. Raises PatchError for what no stock reader can express.
    """
    family = family or Family(None)
    rope_type = _rope_type(scaled, family)
    if rope_type != "longrope" or scaled.spec.method.name == "longrope":
        values = _own_values(scaled, rope_type)
    else:
        values = _universal_values(scaled)
    if rope_type == "longrope":
        # what a reader works out from the two lengths, where it is told neither a factor nor an attention factor
        original = scaled.geometry.original_max_position_embeddings
        usual = longrope_attention_factor(context_length / original if context_length else scaled.spec.factor, original)
        if family.reads_mscales or not math.isclose(scaled.attention_factor, usual):
            values |= dict.fromkeys(MSCALES, scaled.attention_factor)
    known = {key: values[key] for key in NATIVE_KEYS[rope_type] if key in values}
    return {"rope_type": rope_type, "rope_theta": scaled.rope_theta, **known}


def _rope_type(scaled: ScaledRope, family: Family) -> str:
    method = scaled.spec.method
    honoured = family.rope_types or tuple(NATIVE_KEYS)
    if scaled.geometry.still_pairs:
        # of the native types this one alone knows pairs that stand still
        if method.rope_type in ("default", "linear"):
            return "proportional"
        honoured = ("longrope",)
    if method.rope_type in honoured:
        if family.reads_mscales and varies_with_length(scaled):
            raise PatchError(
                f"In stock transformers, {family.model_type} turns by short_factor at every length. Give one list, "
                "long_factor alone, which then serves them all."
            )
        return method.rope_type
    if varies_with_length(scaled):
        raise PatchError(
            f"{scaled.spec.method} follows the current length in a way that no stock reader expresses for this model, "
            f"so it cannot be written. It can be measured in memory: eval-ppl --method {scaled.spec.method} --factor "
            f"{scaled.spec.factor:g}, or compare --methods {scaled.spec.method}."
        )
    return "longrope"


def _own_values(scaled: ScaledRope, rope_type: str) -> Parameters:
    values: Parameters = {
        "factor": scaled.spec.factor,
        ORIGINAL_LENGTH: scaled.geometry.original_max_position_embeddings,
        **scaled.spec.params,
    }
    if scaled.spec.method.rope_type == "default":
        del values["factor"]  # proportional would divide by it once more
    if rope_type == "longrope" and (still := scaled.geometry.still_pairs):
        for key in ("short_factor", "long_factor"):  # a stock reader knows no still pairs here
            values[key] = [*values[key][:-still], *[_STANDS_FOR_ZERO] * still]
    # Only what differs from a reader's own default is written: not every engine knows these two.
    if values.get("truncate") is True:
        del values["truncate"]
    usual = yarn_attention_factor(scaled.spec.factor)
    if rope_type == "longrope" or ("mscale" not in values and not math.isclose(scaled.attention_factor, usual)):
        values["attention_factor"] = scaled.attention_factor
    return values


def _universal_values(scaled: ScaledRope) -> Parameters:
    with np.errstate(divide="ignore"):
        factors = scaled.geometry.powers() / scaled.inv_freq
    factors = np.minimum(factors, _STANDS_FOR_ZERO).tolist()
    return {
        "factor": scaled.spec.factor,
        ORIGINAL_LENGTH: scaled.geometry.original_max_position_embeddings,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": scaled.attention_factor,
    }


def write_settings(config: dict[str, Any], scaled: dict[str | None, ScaledRope], context_length: int) -> None:
    """Edits `config` in place: the scaled ropes in both dialects, and the context_length, tokens. Raises PatchError."""
    section, family = section_of(config), family_of(config)
    before = parameters_by_layer_type(section, family, [])
    written = {
        label: _with_kept_keys(native_parameters(rope, family, context_length), rope, before[label], section, family)
        for label, rope in scaled.items()
    }
    for parameters in written.values():
        if "max_position_embeddings" in parameters:  # a copy that Ministral's config keeps there
            parameters["max_position_embeddings"] = context_length
    _refuse_longrope_of_mixed_layers(section, {head_dim(section, family, label) for label in before}, written)
    main = next(iter(written.values()))
    if None in written:
        section["rope_parameters"] = main
        _write_legacy(section, family, main)
        _write_own_names(section, family, main)
    else:
        nest = {label: written.get(label, parameters) for label, parameters in before.items()}
        section["rope_parameters"] = nest
        _write_legacy_of_nest(section, family, nest, main)
    write_context_length(section, family, context_length)
    if "head_dim" in section and section["head_dim"] is None:
        # transformers 5 divides by null in yarn, longrope and dynamic
        section["head_dim"] = head_dim(section, family)


def write_context_length(section: dict[str, Any], family: Family, context_length: int) -> None:
    """Writes the context length, tokens, under a name that the family reads, and under every other that is there."""
    names = family.names_of(MAX_POSITIONS)
    read = [name for name in names if name in section] or names[:1]
    others = [name for name in COMMON_NAMES[MAX_POSITIONS] if name in section]  # of all these, vLLM takes the smallest
    section |= dict.fromkeys([*read, *others], context_length)


def _refuse_longrope_of_mixed_layers(
    section: dict[str, Any], heads: set[int], written: dict[str | None, Parameters]
) -> None:
    differing = section.get("per_layer_config")
    layers = differing.values() if isinstance(differing, dict) else ()
    own = set().union(*(layer for layer in layers if isinstance(layer, dict)))
    mixed = len(heads) > 1 or own & {"head_dim", "num_attention_heads"}
    if mixed and any(one["rope_type"] == "longrope" for one in written.values()):
        raise PatchError(
            "These frequencies would have to be written as longrope, and transformers refuses longrope where layers "
            "differ in head_dim or num_attention_heads. linear, abf and ntk can be written for this model."
        )


def _with_kept_keys(
    parameters: Parameters, rope: ScaledRope, before: Parameters | None, section: dict[str, Any], family: Family
) -> Parameters:
    """`parameters` and what the checkpoint had there that is no scaling of its own: partial_rotary_factor, sections."""
    # code that comes with a checkpoint may read more than transformers' own does
    kept = {
        key: value
        for key, value in (before or {}).items()
        if key not in _REPLACED and (key in KEPT_KEYS or isinstance(value, dict) or not family.known)
    }
    share = rotary_share(section, family, before or {}, rope.geometry.layer_type)
    if share is not None:
        kept["partial_rotary_factor"] = share
    if rope.geometry.still_pairs and parameters["rope_type"] == "longrope":
        del kept["partial_rotary_factor"]  # here longrope's factors say which pairs stand still
    if QUERY_SCALE in kept:
        kept[ORIGINAL_LENGTH] = rope.geometry.original_max_position_embeddings
    return {**parameters, **kept}


def _write_legacy(section: dict[str, Any], family: Family, main: Parameters) -> None:
    for key in THETA_KEYS:
        if key in section or key == "rope_theta":
            section[key] = main["rope_theta"]
    if isinstance(section.get(LAYER_THETAS), list):
        section[LAYER_THETAS] = [main["rope_theta"] if theta else theta for theta in section[LAYER_THETAS]]
    if "partial_rotary_factor" in main:
        section["partial_rotary_factor"] = main["partial_rotary_factor"]
    # A stale rope_scaling wins over rope_parameters in transformers 5, so it is written always.
    scaling = {key: value for key, value in main.items() if key not in ("rope_theta", "partial_rotary_factor")}
    section["rope_scaling"] = None if main["rope_type"] == "default" else {**scaling, "type": main["rope_type"]}
    if family.two_fields and main["rope_type"] in ("linear", "dynamic"):
        section["rope_scaling"] = {"type": main["rope_type"], "factor": float(main["factor"])}
    if main["rope_type"] == "longrope" and family.bare_longrope and MSCALES[0] not in main:
        # both readers work out factor and attention factor from the two lengths
        section["rope_scaling"] = {key: section["rope_scaling"][key] for key in ("type", "short_factor", "long_factor")}
    if main["rope_type"] == "longrope" or ORIGINAL_LENGTH in section:
        # transformers 4 reads longrope's context_length from here, and a stray one overrides the dict in transformers 5
        original = main.get(ORIGINAL_LENGTH)
        if original is None:
            section.pop(ORIGINAL_LENGTH, None)
        else:
            section[ORIGINAL_LENGTH] = original


def _write_own_names(section: dict[str, Any], family: Family, main: Parameters) -> None:
    if family.own_names is None:
        return
    theta_key, partial_key = family.own_names
    section[theta_key] = main["rope_theta"]
    if "partial_rotary_factor" in main:
        section[partial_key] = main["partial_rotary_factor"]
    if section["rope_scaling"] is not None:
        section["rope_scaling"] = {**main, **section["rope_scaling"]}


def _write_legacy_of_nest(
    section: dict[str, Any], family: Family, nest: dict[Any, Parameters | None], main: Parameters
) -> None:
    """A flat rope_scaling would scale all layers of most types; only those that know better get one."""
    if main.get("truncate") is False:
        section["rope_parameters"] = {**nest, "truncate": False}  # transformers 5 looks for it there alone
    local = next((value for label, value in nest.items() if value and not family.sees_whole_context(label)), None)
    if LOCAL_THETA in section or family.flat_means_full:
        # the flat fields mean the layers that see the whole context, scaled or not
        far = next((value for label, value in nest.items() if value and family.sees_whole_context(label)), main)
        _write_legacy(section, family, {**far, "rope_type": rope_type_of(far)})
        if local is not None and (LOCAL_THETA in section or local["rope_theta"] != far["rope_theta"]):
            section[LOCAL_THETA] = local["rope_theta"]
        return
    if "rope_scaling" in section:
        section["rope_scaling"] = None
    section.pop(ORIGINAL_LENGTH, None)  # transformers reads those of the layer types alone
