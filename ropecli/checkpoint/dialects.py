"""The RoPE fields of config.json in their two dialects: transformers 5's `rope_parameters`, and the older
`rope_theta` + `rope_scaling` (+ `partial_rotary_factor`, `rope_local_base_freq`).

Reads either and writes both, consistently: a transformers 5 that finds only the older fields, or a
transformers 4 that finds only the newer, otherwise reads a wrong base in silence.
"""

import math
from dataclasses import dataclass
from typing import Any

from ropecli.checkpoint.reading import section_of
from ropecli.errors import CheckpointError
from ropecli.rope import RopeGeometry, ScaledRope, ScalingSpec
from ropecli.scaling.registry import get_method
from ropecli.scaling.yarn import yarn_attention_factor

WINDOW_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_THETA_KEYS = ("rope_theta", "rotary_emb_base")
_PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", *_THETA_KEYS, *_PARTIAL_KEYS[1:])
_LOCAL_THETA = "rope_local_base_freq"
_LOCAL_WORDS = ("sliding", "local", "chunked")
# The first Llama releases name no RoPE field at all.
_IMPLICIT_THETA = {"llama": 10000.0}
# Types for which transformers 4 knew rope_local_base_freq.
_TWO_THETAS = {"gemma3", "gemma3_text", "gemma3n", "gemma3n_text"}
# Types that transformers 5 reads by names of their own: what rope_scaling does not repeat is lost there.
_OWN_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}
# rope_type -> the keys that transformers reads beside rope_type and rope_theta.
_NATIVE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}


@dataclass(frozen=True)
class ConfiguredRope:
    """One rotary embedding as a config.json describes it; `geometry.layer_type` is None where all layers share it."""

    geometry: RopeGeometry
    spec: ScalingSpec


@dataclass(frozen=True)
class RopeSettings:
    """All that config.json says of RoPE. warnings: what it leaves open or contradicts, in sentences."""

    ropes: tuple[ConfiguredRope, ...]
    max_position_embeddings: int
    warnings: tuple[str, ...]


def read_settings(config: dict[str, Any], original_length: int | None = None) -> RopeSettings:
    """The RoPE settings of a config.json, in either dialect.

    original_length: corrects a config that lies about its pretraining window, tokens. Raises CheckpointError
    for a model without rotary embeddings, and for values that are not numbers.
    """
    section = section_of(config)
    if not any(section.get(key) is not None for key in _ROPE_KEYS) and config.get("model_type") not in _IMPLICIT_THETA:
        raise CheckpointError(
            f"model_type {config.get('model_type')!r} has no rotary position embedding: "
            f"config.json holds none of {', '.join(_ROPE_KEYS)}."
        )
    warnings: list[str] = []
    window = _whole_number(section, WINDOW_KEYS)
    by_layer_type = _parameters_by_layer_type(section, warnings)
    ropes = []
    for layer_type, parameters in by_layer_type.items():
        if parameters is not None:  # a layer type may carry no positions at all
            ropes.append(_read_rope(section, parameters, layer_type, window, original_length, warnings))
    return RopeSettings(tuple(ropes), window, tuple(warnings))


def sees_whole_context(layer_type: str | None) -> bool:
    """False for layers with a sliding or chunked window: they never see far, so scaling only harms them."""
    return not any(word in (layer_type or "") for word in _LOCAL_WORDS)


def native_parameters(scaled: ScaledRope) -> dict[str, Any]:
    """The `rope_parameters` dict by which stock transformers makes these frequencies."""
    rope_type = get_method(scaled.spec.method).rope_type
    values = {
        "factor": scaled.spec.factor,
        "original_max_position_embeddings": scaled.geometry.original_max_position_embeddings,
        **scaled.spec.params,
    }
    # Only what differs from a reader's own default is written: not every engine knows these two.
    if values.get("truncate") is True:
        del values["truncate"]
    if rope_type == "longrope" or not math.isclose(scaled.attention_factor, yarn_attention_factor(scaled.spec.factor)):
        values["attention_factor"] = scaled.attention_factor
    known = {key: values[key] for key in _NATIVE_KEYS[rope_type] if key in values}
    return {"rope_type": rope_type, "rope_theta": scaled.rope_theta, **known}


def write_settings(config: dict[str, Any], scaled: dict[str | None, ScaledRope], window: int) -> None:
    """Edits `config` in place: the ropes of the given layer types in both dialects, and the window, tokens."""
    section = section_of(config)
    before = _parameters_by_layer_type(section, [])
    written = {
        label: _with_kept_keys(native_parameters(rope), before[label], section) for label, rope in scaled.items()
    }
    main = next(parameters for label, parameters in written.items() if sees_whole_context(label))
    nested = None not in written
    section["rope_parameters"] = {label: written.get(label, parameters) for label, parameters in before.items()}
    if not nested:
        section["rope_parameters"] = main
    if not nested or _LOCAL_THETA in section or config.get("model_type") in _TWO_THETAS:
        _write_legacy(section, main)
        if not nested and config.get("model_type") in _OWN_NAMES:
            _write_own_names(section, main, *_OWN_NAMES[config["model_type"]])
        if nested:
            local = next(value for label, value in before.items() if not sees_whole_context(label))
            section[_LOCAL_THETA] = (local or main)["rope_theta"]
    elif "rope_scaling" in section:
        section["rope_scaling"] = None  # where layers differ, most types of transformers 5 would scale them all by it
    for key in WINDOW_KEYS:
        if key in section:
            section[key] = window
    if "head_dim" in section and section["head_dim"] is None:
        # transformers 5 divides by null in yarn, longrope and dynamic
        section["head_dim"] = _head_dim(section)


def _with_kept_keys(
    parameters: dict[str, Any], before: dict[str, Any] | None, section: dict[str, Any]
) -> dict[str, Any]:
    """`parameters` and what the checkpoint had there that is no scaling of its own: partial_rotary_factor, sections."""
    replaced = {"rope_type", "type", "rope_theta", "mscale", "mscale_all_dim", *sum(_NATIVE_KEYS.values(), ())}
    kept = {key: value for key, value in (before or {}).items() if key not in replaced}
    partial = _first(section, _PARTIAL_KEYS)
    if partial is not None:
        kept.setdefault("partial_rotary_factor", partial)
    return {**parameters, **kept}


def _write_legacy(section: dict[str, Any], main: dict[str, Any]) -> None:
    for key in _THETA_KEYS:
        if key in section or key == "rope_theta":
            section[key] = main["rope_theta"]
    if "partial_rotary_factor" in main:
        section["partial_rotary_factor"] = main["partial_rotary_factor"]
    # A stale rope_scaling wins over rope_parameters in transformers 5, so it is written always.
    scaling = {key: value for key, value in main.items() if key not in ("rope_theta", "partial_rotary_factor")}
    section["rope_scaling"] = None if main["rope_type"] == "default" else {**scaling, "type": main["rope_type"]}
    if main["rope_type"] == "longrope" or "original_max_position_embeddings" in section:
        # transformers 4 reads longrope's window from here, and a stray one overrides the dict in transformers 5
        original = main.get("original_max_position_embeddings")
        if original is None:
            section.pop("original_max_position_embeddings", None)
        else:
            section["original_max_position_embeddings"] = original


def _write_own_names(section: dict[str, Any], main: dict[str, Any], theta_key: str, partial_key: str) -> None:
    section[theta_key] = main["rope_theta"]
    if "partial_rotary_factor" in main:
        section[partial_key] = main["partial_rotary_factor"]
    if section["rope_scaling"] is not None:
        section["rope_scaling"] = {**main, **section["rope_scaling"]}


def _parameters_by_layer_type(section: dict[str, Any], warnings: list[str]) -> dict[str | None, dict[str, Any] | None]:
    """RoPE parameters with a `rope_theta` each, by layer type; one entry under None where all layers share them."""
    new = _mapping(section, "rope_parameters")
    legacy = _mapping(section, "rope_scaling")
    theta = _first(section, _THETA_KEYS)
    nested = {key: value for key, value in new.items() if value is None or isinstance(value, dict)}
    if nested and any(isinstance(value, dict) for value in nested.values()):
        return {key: value if value is None else {"rope_theta": theta, **value} for key, value in nested.items()}
    if section.get(_LOCAL_THETA) is not None:
        return {
            "full_attention": {"rope_theta": theta, **legacy},
            "sliding_attention": {"rope_type": "default", "rope_theta": section[_LOCAL_THETA]},
        }
    # transformers 5 lets rope_scaling win; the base it may lack is then taken from where it stands.
    parameters = {**(legacy or new)}
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = theta if theta is not None else new.get("rope_theta")
    if legacy and new and _rope_type(legacy) != _rope_type(new):
        warnings.append(
            f"rope_scaling says {_rope_type(legacy)!r} and rope_parameters {_rope_type(new)!r}; "
            "transformers follows rope_scaling, and so does this."
        )
    if new.get("rope_theta") is not None and theta is not None and new["rope_theta"] != theta:
        warnings.append(f"rope_theta is {theta:g} at the top and {new['rope_theta']:g} in rope_parameters.")
    return {None: parameters}


def _read_rope(
    section: dict[str, Any],
    parameters: dict[str, Any],
    layer_type: str | None,
    window: int,
    original_length: int | None,
    warnings: list[str],
) -> ConfiguredRope:
    theta = parameters.get("rope_theta")
    if theta is None:
        theta = _IMPLICIT_THETA.get(section.get("model_type", ""), 10000.0)
        warnings.append(f"config.json names no rope_theta; transformers takes {theta:g}, and so does this.")
    theta = _positive_number("rope_theta", theta)
    head_dim = _head_dim(section)
    partial = parameters.get("partial_rotary_factor", _first(section, _PARTIAL_KEYS))
    rotary_dim = int(head_dim * _positive_number("partial_rotary_factor", 1.0 if partial is None else partial))
    if rotary_dim < 2:
        raise CheckpointError(f"The rotary part of a head is {rotary_dim} wide; at least 2 was expected.")
    spec = _read_spec(parameters)
    original = original_length or _original_window(section, parameters, spec, window, warnings)
    geometry = RopeGeometry(head_dim, rotary_dim, theta, original, layer_type)
    return ConfiguredRope(geometry, spec)


def _read_spec(parameters: dict[str, Any]) -> ScalingSpec:
    rope_type = _rope_type(parameters)
    if rope_type not in _NATIVE_KEYS:
        known = ", ".join(_NATIVE_KEYS)
        raise CheckpointError(f"rope_type {rope_type!r} is not known here. Known: {known}.")
    if rope_type == "default":
        return ScalingSpec("none")
    method = rope_type
    if rope_type == "yarn" and parameters.get("attention_factor") == 1.0:
        method = "ntk-by-parts"
    params = {key: parameters[key] for key in get_method(method).parameters if parameters.get(key) is not None}
    if method == "yarn" and parameters.get("mscale") and parameters.get("mscale_all_dim"):
        # DeepSeek's pair: the rest of the temperature is in the softmax scale
        params.setdefault("attention_factor", _mscale(parameters, "mscale") / _mscale(parameters, "mscale_all_dim"))
    return ScalingSpec(method, _positive_number("factor", parameters.get("factor", 1.0)), params)


def _mscale(parameters: dict[str, Any], key: str) -> float:
    return 0.1 * parameters[key] * math.log(parameters.get("factor", 1.0)) + 1.0


def _original_window(
    section: dict[str, Any], parameters: dict[str, Any], spec: ScalingSpec, window: int, warnings: list[str]
) -> int:
    # The stray one first, as transformers 5 does.
    for value in (section.get("original_max_position_embeddings"), parameters.get("original_max_position_embeddings")):
        if value is not None:
            return int(_positive_number("original_max_position_embeddings", value))
    if spec.method not in ("none", "dynamic"):  # dynamic takes max_position_embeddings for the original window
        warnings.append(
            f"config.json scales by {spec.factor:g} but does not name its pretraining window; "
            f"max_position_embeddings, {window}, is taken for it. Correct it with --original-length."
        )
    return window


def _rope_type(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _head_dim(section: dict[str, Any]) -> int:
    """Width of what turns in a head: MLA's rope part, or head_dim, or hidden_size / heads."""
    for key in ("qk_rope_head_dim", "head_dim"):
        if section.get(key) is not None:
            return int(_positive_number(key, section[key]))
    width = _whole_number(section, ("hidden_size", "n_embd", "d_model"))
    return width // _whole_number(section, ("num_attention_heads", "n_head", "n_heads"))


def _first(section: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((section[key] for key in keys if section.get(key) is not None), None)


def _mapping(section: dict[str, Any], key: str) -> dict[str, Any]:
    value = section.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} in config.json is {value!r}; an object was expected.")
    return value


def _whole_number(section: dict[str, Any], keys: tuple[str, ...]) -> int:
    value = _first(section, keys)
    if value is None:
        raise CheckpointError(f"config.json has none of {', '.join(keys)}.")
    return int(_positive_number(keys[0], value))


def _positive_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{key} in config.json is {value!r}; a positive number was expected.")
    return value
