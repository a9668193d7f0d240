"""The two dialects of RoPE fields in config.json: transformers 5's `rope_parameters`, and the older `rope_theta` +
`rope_scaling` (+ `partial_rotary_factor`, `rope_local_base_freq`). Brings both to one set of parameters.
"""

from typing import Any

from ropecli.config.families import MSCALES, Family
from ropecli.config.fields import first, mapping
from ropecli.errors import CheckpointError, shown

MAX_POSITIONS = "max_position_embeddings"
THETA_KEYS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
LOCAL_THETA = "rope_local_base_freq"
LAYER_THETAS = "layer_rope_theta"
ORIGINAL_LENGTH = "original_max_position_embeddings"
QUERY_SCALE = "llama_4_scaling_beta"
"""Ministral's: queries grow with position // ORIGINAL_LENGTH, whatever the rope_type."""
MSCALE_PAIR = ("mscale", "mscale_all_dim")
"""DeepSeek's: the second multiplies the softmax scale too, the first over the second cos and sin."""
# rope_type -> the keys that transformers reads beside rope_type and rope_theta.
NATIVE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        ORIGINAL_LENGTH,
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        *MSCALE_PAIR,
    ),
    "llama3": ("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", ORIGINAL_LENGTH, "short_factor", "long_factor", "attention_factor", *MSCALES),
    "proportional": ("factor", "partial_rotary_factor"),
}
# What models' own code, or an engine, reads beside what the rope_type means.
KEPT_KEYS = (
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    QUERY_SCALE,
    "max_position_embeddings",
    "alpha",  # Hunyuan's dynamic
    "attn_factor",  # vLLM's name of the attention factor
    "extrapolation_factor",
)
_OLD_NAMES = {"su": "longrope"}

Parameters = dict[str, Any]


def parameters_by_layer_type(
    section: dict[str, Any], family: Family, warnings: list[str]
) -> dict[str | None, Parameters | None]:
    """RoPE parameters, by layer type; one entry under None where all layers share them.

    Raises CheckpointError for a type that has them by layer type, where config.json has them for all alike.
    """
    new, legacy = mapping(section, "rope_parameters"), mapping(section, "rope_scaling")
    theta = first(section, THETA_KEYS)
    if theta is None and isinstance(section.get("attn_config"), dict):
        theta = first(section["attn_config"], THETA_KEYS)
        if theta is not None and "rope_theta" not in new:
            warnings.append(
                f"attn_config names rope_theta {theta}, which transformers 5 does not read: it takes 10000. A patch "
                "names it where it is read."
            )
    if any(isinstance(value, dict) for value in new.values()):
        # transformers 5 looks for truncate beside the layer types alone
        beside = {"truncate": new["truncate"]} if "truncate" in new else {}
        ropes: dict[str | None, Parameters | None] = {
            key: value if value is None else _nested_parameters(value, theta, beside)
            for key, value in new.items()
            if value is None or isinstance(value, dict)
        }
        if family.flat_means_full and legacy and (far := ropes.get("full_attention")) is not None:
            far |= {key: value for key, value in legacy.items() if key != "truncate"}  # as transformers 5 does
    else:
        if family.flat_means_full and new:  # which transformers 5 leaves aside
            raise _flat(family)
        if family.flat_means_full and legacy.get("type") and legacy.get("rope_type") is None:
            warnings.append(
                f"rope_scaling names its method by `type` alone ({legacy['type']}), which transformers 5 does not read "
                f"in {family.model_type}. A patch names it by rope_type."
            )
        ropes = _by_layer_type(section, family, _flat_parameters(section, new, legacy, theta, warnings))
    _refuse_mixed_bases(section)
    for layer_type, parameters in ropes.items():
        if parameters is not None and parameters["rope_theta"] is None:
            parameters["rope_theta"] = _implicit_base(family, layer_type, warnings)
    return ropes


def _refuse_mixed_bases(section: dict[str, Any]) -> None:
    """A list of bases by layer (Granite) wins over the one base; a layer of base 0 does not turn."""
    bases = section.get(LAYER_THETAS)
    if bases is None:
        return
    named = [first(section, THETA_KEYS), mapping(section, "rope_parameters").get("rope_theta")]
    turning = [base for base in [*named, *(bases if isinstance(bases, list) else [])] if base]
    if not isinstance(bases, list) or any(base != turning[0] for base in turning):
        raise CheckpointError(
            f"{LAYER_THETAS} in config.json holds {shown(bases)}; one base for all layers is supported."
        )


def _by_layer_type(section: dict[str, Any], family: Family, parameters: Parameters) -> dict[str | None, Any]:
    """What flat fields mean: one rope for all layers or, in some types, one for those that see the whole context."""
    if section.get(LOCAL_THETA) is not None or family.flat_means_full:
        bases = {defaults.get("rope_theta") for defaults in family.layers.values()}
        local_theta = section.get(LOCAL_THETA, parameters["rope_theta"] if len(bases) == 1 else None)
        return {
            "full_attention": parameters,
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
    if family.layers:
        raise _flat(family)
    return {None: parameters}


def _flat(family: Family) -> CheckpointError:
    return CheckpointError(
        f"Layers of {family.model_type} turn by their type ({', '.join(family.layers)}), and config.json gives one "
        "set of RoPE fields for all. Write rope_parameters by layer type, as transformers 5 does when it saves."
    )


def _nested_parameters(parameters: Parameters, theta: Any, beside: Parameters) -> Parameters:
    own = {key: value for key, value in parameters.items() if key != "truncate"}
    return {"rope_theta": theta, **own, **beside}


def _flat_parameters(
    section: dict[str, Any], new: Parameters, legacy: Parameters, theta: Any, warnings: list[str]
) -> Parameters:
    # transformers 5 lets rope_scaling win; what it lacks of the geometry is then taken from where it stands.
    parameters = {**(legacy or new)}
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = theta if theta is not None else new.get("rope_theta")
    if legacy and first(section, PARTIAL_KEYS) is None and "partial_rotary_factor" in new:
        parameters.setdefault("partial_rotary_factor", new["partial_rotary_factor"])
    if legacy and new and rope_type_of(legacy) != rope_type_of(new):
        warnings.append(
            f"rope_scaling says {rope_type_of(legacy)!r} and rope_parameters {rope_type_of(new)!r}; "
            "transformers follows rope_scaling, and so does this."
        )
    if new.get("rope_theta") is not None and theta is not None and new["rope_theta"] != theta:
        warnings.append(f"rope_theta is {theta} at the top and {new['rope_theta']} in rope_parameters.")
    return parameters


def _implicit_base(family: Family, layer_type: str | None, warnings: list[str]) -> float:
    theta = family.layers.get(layer_type or "", {}).get("rope_theta", family.rope_theta)
    if theta is None:
        raise CheckpointError(
            "config.json names no rope_theta, and the default differs from one model type to another. "
            "Write the base that the model was trained with into it."
        )
    layers = f" in layers of type {layer_type}" if layer_type else ""
    warnings.append(f"config.json names no rope_theta; models of this type have {theta:g}{layers}.")
    return theta


def rope_type_of(parameters: Parameters) -> str:
    """The rope_type that the parameters name, by its name of today."""
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if rope_type == "yarn" and "long_factor" in parameters:  # an early Phi-3
        return "longrope"
    return _OLD_NAMES.get(rope_type, rope_type)
