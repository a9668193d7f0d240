"""Reads the RoPE fields of config.json in their two dialects: transformers 5's `rope_parameters`, and the older
`rope_theta` + `rope_scaling` (+ `partial_rotary_factor`, `rope_local_base_freq`). Writing them is encoding.py's.
"""

import math
from dataclasses import dataclass
from typing import Any

from ropecli.checkpoint.fields import first, head_dim, mapping, positive_number, rotary_dim, whole_number
from ropecli.checkpoint.reading import section_of
from ropecli.errors import CheckpointError
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import get_method

WINDOW_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
THETA_KEYS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
LOCAL_THETA = "rope_local_base_freq"
ORIGINAL_WINDOW = "original_max_position_embeddings"
# rope_type -> the keys that transformers reads beside rope_type and rope_theta.
NATIVE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL_WINDOW, "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "llama3": ("factor", ORIGINAL_WINDOW, "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", ORIGINAL_WINDOW, "short_factor", "long_factor", "attention_factor"),
}
# Types whose older dialect, flat, scales the layers that see the whole context alone.
NESTED_IN_SPIRIT = {"gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "olmo3"}
_ROPE_KEYS = ("rope_parameters", "rope_scaling", *THETA_KEYS, *PARTIAL_KEYS[1:])
_LOCAL_WORDS = ("sliding", "local", "chunked")
# Types with releases whose config.json names no base; for every other one a missing base is an error, since
# transformers' own default differs from type to type.
_IMPLICIT_THETA = {"llama": 10000.0, "falcon": 10000.0, "gpt_neox": 10000.0}
_OLD_NAMES = {"su": "longrope"}

Parameters = dict[str, Any]


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
    _refuse_without_rope(config, section)
    warnings: list[str] = []
    window = whole_number(section, WINDOW_KEYS)
    if original_length and original_length > window:
        warnings.append(f"--original-length {original_length} is above the config's own window, {window}.")
    ropes = []
    for layer_type, parameters in parameters_by_layer_type(section, warnings).items():
        if parameters is not None:  # a layer type may carry no positions at all
            ropes.append(_read_rope(section, parameters, layer_type, window, original_length, warnings))
    return RopeSettings(tuple(ropes), window, tuple(dict.fromkeys(warnings)))


def sees_whole_context(layer_type: str | None) -> bool:
    """False for layers with a sliding or chunked window: they never see far, so scaling only harms them."""
    return not any(word in (layer_type or "") for word in _LOCAL_WORDS)


def parameters_by_layer_type(section: dict[str, Any], warnings: list[str]) -> dict[str | None, Parameters | None]:
    """RoPE parameters with a `rope_theta` each, by layer type; one entry under None where all layers share them."""
    new, legacy = mapping(section, "rope_parameters"), mapping(section, "rope_scaling")
    theta = first(section, THETA_KEYS)
    if any(isinstance(value, dict) for value in new.values()):
        nested = {key: value for key, value in new.items() if value is None or isinstance(value, dict)}
        # transformers 5 looks for truncate beside the layer types alone
        beside = {"truncate": new["truncate"]} if "truncate" in new else {}
        return {
            key: value if value is None else _nested_parameters(value, theta, beside) for key, value in nested.items()
        }
    parameters = _flat_parameters(new, legacy, theta, warnings)
    if section.get(LOCAL_THETA) is not None or section.get("model_type") in NESTED_IN_SPIRIT:
        local_theta = section.get(LOCAL_THETA, parameters["rope_theta"])
        return {
            "full_attention": parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
    return {None: parameters}


def _nested_parameters(parameters: Parameters, theta: Any, beside: Parameters) -> Parameters:
    own = {key: value for key, value in parameters.items() if key != "truncate"}
    return {"rope_theta": theta, **own, **beside}


def _flat_parameters(new: Parameters, legacy: Parameters, theta: Any, warnings: list[str]) -> Parameters:
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
        warnings.append(f"rope_theta is {theta} at the top and {new['rope_theta']} in rope_parameters.")
    return parameters


def _refuse_without_rope(config: dict[str, Any], section: dict[str, Any]) -> None:
    model_type = config.get("model_type")
    if not isinstance(model_type, str | None):
        raise CheckpointError(f"model_type in config.json is {model_type!r}; a name was expected.")
    if section.get("alibi"):
        raise CheckpointError("config.json asks for alibi; this model's layers do not use their rotary embeddings.")
    if model_type not in _IMPLICIT_THETA and all(section.get(key) is None for key in _ROPE_KEYS):
        raise CheckpointError(
            f"model_type {model_type!r} has no rotary position embedding: "
            f"config.json holds none of {', '.join(_ROPE_KEYS)}."
        )


def _read_rope(
    section: dict[str, Any],
    parameters: Parameters,
    layer_type: str | None,
    window: int,
    original_length: int | None,
    warnings: list[str],
) -> ConfiguredRope:
    theta = parameters.get("rope_theta")
    if theta is None:
        theta = _IMPLICIT_THETA.get(section.get("model_type", ""))
        if theta is None:
            raise CheckpointError(
                "config.json names no rope_theta, and the default differs from one model type to another. "
                "Write the base that the model was trained with into it."
            )
        warnings.append(f"config.json names no rope_theta; models of this type have {theta:g}.")
    share = parameters.get("partial_rotary_factor", first(section, PARTIAL_KEYS))
    width = rotary_dim(section, share)
    method = _read_method(parameters)
    original = original_length or _original_window(section, parameters, method, window, warnings)
    theta = positive_number("rope_theta", theta)
    if theta <= 1:
        raise CheckpointError(f"rope_theta in config.json is {theta:g}; a base above 1 was expected.")
    geometry = RopeGeometry(head_dim(section), width, theta, original, layer_type)
    return ConfiguredRope(geometry, _read_spec(parameters, method, window / original))


def _read_method(parameters: Parameters) -> str:
    rope_type = _rope_type(parameters)
    if rope_type not in NATIVE_KEYS:
        known = ", ".join(NATIVE_KEYS)
        raise CheckpointError(f"rope_type {rope_type!r} is not known here. Known: {known}.")
    if rope_type == "default":
        return "none"
    return "ntk-by-parts" if rope_type == "yarn" and parameters.get("attention_factor") == 1.0 else rope_type


def _read_spec(parameters: Parameters, method: str, implied_factor: float) -> ScalingSpec:
    """implied_factor: current window over original, which transformers takes where yarn and longrope name none."""
    if method == "none":
        return ScalingSpec(method)
    factor = parameters.get("factor")
    if factor is None:
        factor = max(1.0, implied_factor)
    factor = positive_number("factor", factor)
    params = {key: parameters[key] for key in get_method(method).parameters if parameters.get(key) is not None}
    if method == "yarn" and parameters.get("mscale") and parameters.get("mscale_all_dim"):
        # DeepSeek's pair: the rest of the temperature is in the softmax scale
        pair = (positive_number(key, parameters[key]) for key in ("mscale", "mscale_all_dim"))
        above, below = (0.1 * mscale * math.log(max(factor, 1.0)) + 1.0 for mscale in pair)
        params.setdefault("attention_factor", above / below)
    return ScalingSpec(method, factor, params)


def _original_window(
    section: dict[str, Any], parameters: Parameters, method: str, window: int, warnings: list[str]
) -> int:
    if method == "dynamic":  # transformers takes max_position_embeddings, whatever else is named
        return window
    for place in (section, parameters):  # the stray one first, as transformers 5 does
        if place.get(ORIGINAL_WINDOW) is not None:
            return whole_number(place, (ORIGINAL_WINDOW,))
    if method != "none":
        warnings.append(
            f"config.json scales by {method} but does not name its pretraining window; "
            f"max_position_embeddings, {window}, is taken for it. Correct it with patch --original-length."
        )
    return window


def _rope_type(parameters: Parameters) -> str:
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    return _OLD_NAMES.get(rope_type, rope_type)
