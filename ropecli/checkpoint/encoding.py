"""Writes a scaled rope into a config in both dialects, consistently: a transformers 5 that finds only the older
fields, or a transformers 4 that finds only the newer, otherwise reads a wrong base in silence.
"""

import math
from typing import Any

from ropecli.checkpoint.dialects import (
    LOCAL_THETA,
    NATIVE_KEYS,
    NESTED_IN_SPIRIT,
    ORIGINAL_WINDOW,
    PARTIAL_KEYS,
    THETA_KEYS,
    WINDOW_KEYS,
    Parameters,
    parameters_by_layer_type,
    sees_whole_context,
)
from ropecli.checkpoint.fields import first, head_dim
from ropecli.checkpoint.reading import section_of
from ropecli.rope import ScaledRope
from ropecli.scaling.registry import get_method
from ropecli.scaling.yarn import yarn_attention_factor

# Types that transformers 5 reads by names of their own: what rope_scaling does not repeat is lost there.
_OWN_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}
_REPLACED = {"rope_type", "type", "rope_theta", "mscale", "mscale_all_dim", *sum(NATIVE_KEYS.values(), ())}


def native_parameters(scaled: ScaledRope) -> Parameters:
    """The `rope_parameters` dict by which stock transformers makes these frequencies."""
    rope_type = get_method(scaled.spec.method).rope_type
    values = {
        "factor": scaled.spec.factor,
        ORIGINAL_WINDOW: scaled.geometry.original_max_position_embeddings,
        **scaled.spec.params,
    }
    # Only what differs from a reader's own default is written: not every engine knows these two.
    if values.get("truncate") is True:
        del values["truncate"]
    if rope_type == "longrope" or not math.isclose(scaled.attention_factor, yarn_attention_factor(scaled.spec.factor)):
        values["attention_factor"] = scaled.attention_factor
    known = {key: values[key] for key in NATIVE_KEYS[rope_type] if key in values}
    return {"rope_type": rope_type, "rope_theta": scaled.rope_theta, **known}


def write_settings(config: dict[str, Any], scaled: dict[str | None, ScaledRope], window: int) -> None:
    """Edits `config` in place: the ropes that see the whole context in both dialects, and the window, tokens."""
    section = section_of(config)
    before = parameters_by_layer_type(section, [])
    written = {
        label: _with_kept_keys(native_parameters(rope), before[label], section) for label, rope in scaled.items()
    }
    main = next(iter(written.values()))
    if None in written:
        section["rope_parameters"] = main
        _write_legacy(section, main)
        _write_own_names(section, main)
    else:
        nest = {label: written.get(label, parameters) for label, parameters in before.items()}
        section["rope_parameters"] = nest
        _write_legacy_of_nest(section, nest, main)
    for key in WINDOW_KEYS:
        if key in section:
            section[key] = window
    if "head_dim" in section and section["head_dim"] is None:
        # transformers 5 divides by null in yarn, longrope and dynamic
        section["head_dim"] = head_dim(section)


def _with_kept_keys(parameters: Parameters, before: Parameters | None, section: dict[str, Any]) -> Parameters:
    """`parameters` and what the checkpoint had there that is no scaling of its own: partial_rotary_factor, sections."""
    kept = {key: value for key, value in (before or {}).items() if key not in _REPLACED}
    partial = first(section, PARTIAL_KEYS)
    if partial is not None:
        kept.setdefault("partial_rotary_factor", partial)
    return {**parameters, **kept}


def _write_legacy(section: dict[str, Any], main: Parameters) -> None:
    for key in THETA_KEYS:
        if key in section or key == "rope_theta":
            section[key] = main["rope_theta"]
    if "partial_rotary_factor" in main:
        section["partial_rotary_factor"] = main["partial_rotary_factor"]
    # A stale rope_scaling wins over rope_parameters in transformers 5, so it is written always.
    scaling = {key: value for key, value in main.items() if key not in ("rope_theta", "partial_rotary_factor")}
    section["rope_scaling"] = None if main["rope_type"] == "default" else {**scaling, "type": main["rope_type"]}
    if main["rope_type"] == "longrope" or ORIGINAL_WINDOW in section:
        # transformers 4 reads longrope's window from here, and a stray one overrides the dict in transformers 5
        original = main.get(ORIGINAL_WINDOW)
        if original is None:
            section.pop(ORIGINAL_WINDOW, None)
        else:
            section[ORIGINAL_WINDOW] = original


def _write_own_names(section: dict[str, Any], main: Parameters) -> None:
    if section.get("model_type") not in _OWN_NAMES:
        return
    theta_key, partial_key = _OWN_NAMES[section["model_type"]]
    section[theta_key] = main["rope_theta"]
    if "partial_rotary_factor" in main:
        section[partial_key] = main["partial_rotary_factor"]
    if section["rope_scaling"] is not None:
        section["rope_scaling"] = {**main, **section["rope_scaling"]}


def _write_legacy_of_nest(section: dict[str, Any], nest: dict[Any, Parameters | None], main: Parameters) -> None:
    """A flat rope_scaling would scale all layers of most types; only those that know better get one."""
    if main.get("truncate") is False:
        section["rope_parameters"] = {**nest, "truncate": False}  # transformers 5 looks for it there alone
    local = next((value for label, value in nest.items() if value and not sees_whole_context(label)), None)
    if LOCAL_THETA in section or section.get("model_type") in NESTED_IN_SPIRIT:
        _write_legacy(section, main)
        if local is not None and (LOCAL_THETA in section or local["rope_theta"] != main["rope_theta"]):
            section[LOCAL_THETA] = local["rope_theta"]
    elif "rope_scaling" in section:
        section["rope_scaling"] = None
