"""Reads both dialects of RoPE fields in config.json into one set of parameters.

The dialects are `rope_parameters` of transformers 5, and the older, flat `rope_theta` + `rope_scaling`
(+ `partial_rotary_factor`, and the names of bases by layer type in families.py).
"""

from typing import Any

from ropecli.config.families import MSCALES, Family
from ropecli.config.fields import first, mapping
from ropecli.config.layers import layer_labels
from ropecli.errors import CheckpointError, shown

MAX_POSITIONS = "max_position_embeddings"
THETA_KEYS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
LOCAL_THETA = "rope_local_base_freq"
LAYER_THETAS = "layer_rope_theta"
PARTIAL_LIST = "partial_rotary_factors"
"""Step 3.7: a list by layer."""
ORIGINAL_LENGTH = "original_max_position_embeddings"
QUERY_SCALE = "llama_4_scaling_beta"
"""Ministral scales queries by position // ORIGINAL_LENGTH, for any rope_type."""
MSCALE_PAIR = ("mscale", "mscale_all_dim")
"""DeepSeek: mscale / mscale_all_dim scales cos and sin; mscale_all_dim also scales the softmax."""
# rope_type -> the keys that transformers reads in addition to rope_type and rope_theta.
NATIVE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL_LENGTH, "beta_fast", "beta_slow", "truncate", "attention_factor", *MSCALE_PAIR),
    "llama3": ("factor", ORIGINAL_LENGTH, "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", ORIGINAL_LENGTH, "short_factor", "long_factor", "attention_factor", *MSCALES),
    "proportional": ("factor", "partial_rotary_factor"),
}
# Further keys that a model's code or an inference engine reads.
KEPT_KEYS = (
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    QUERY_SCALE,
    "max_position_embeddings",
    "attn_factor",  # vLLM's name for attention_factor
    "extrapolation_factor",
)
_OLD_NAMES = {"su": "longrope", "mrope": "default"}

Parameters = dict[str, Any]


def parameters_by_layer_type(
    section: dict[str, Any], family: Family, warnings: list[str], *, stock: bool = False
) -> dict[str | None, Parameters | None]:
    """RoPE parameters by layer type; one entry under None if all layers share them.

    stock: leave out what transformers ignores by mistake, and a warning names. Raises CheckpointError if the model type
    requires parameters by layer type, but config.json has one set for all.
    """
    new, legacy = mapping(section, "rope_parameters"), mapping(section, "rope_scaling")
    theta = first(section, THETA_KEYS)
    if theta is None and isinstance(section.get("attn_config"), dict):
        theta = first(section["attn_config"], THETA_KEYS)
        if theta is not None and "rope_theta" not in new:
            warnings.append(
                f"attn_config sets rope_theta to {theta}, but transformers 5 ignores it and uses 10000. A patch writes "
                "it where it is read."
            )
            theta = None if stock else theta
    if any(isinstance(value, dict) for value in new.values()):
        # transformers 5 reads truncate only next to the layer types
        shared = {"truncate": new["truncate"]} if "truncate" in new else {}
        ropes: dict[str | None, Parameters | None] = {}
        for label, nested in new.items():
            if nested is None:
                ropes[label] = None
            elif isinstance(nested, dict):
                by_type = {key: value for key, value in nested.items() if key != "truncate"}
                ropes[label] = {"rope_theta": theta, **by_type, **shared}
        for parameters in (ropes.get(label) for label in family.flat_scaling):
            if parameters is not None:
                parameters |= {key: value for key, value in legacy.items() if key != "truncate"}  # like transformers 5
    else:
        in_full = "full_attention" in family.flat_scaling
        if in_full and new:  # transformers 5 ignores it
            raise _flat(family)
        if in_full and legacy.get("type") and legacy.get("rope_type") is None:
            warnings.append(
                f"rope_scaling has `type` ({legacy['type']}) but no rope_type; transformers 5 ignores `type` in "
                f"{family.model_type}. A patch writes rope_type."
            )
            legacy = {**legacy, "type": None} if stock else legacy
        flat = _flat_parameters(section, new, legacy, theta, warnings)
        ropes = _by_layer_type(section, family, flat, warnings, stock=stock)
    _refuse_mixed_bases(section)
    for layer_type, parameters in ropes.items():
        if parameters is not None and parameters["rope_theta"] is None:
            parameters["rope_theta"] = _implicit_base(family, layer_type)
    return ropes


def _refuse_mixed_bases(section: dict[str, Any]) -> None:
    """Refuse different bases by layer. Granite's list takes precedence over rope_theta; base 0 means no rotation."""
    bases = section.get(LAYER_THETAS)
    if bases is None:
        return
    named = [first(section, THETA_KEYS), mapping(section, "rope_parameters").get("rope_theta")]
    rotating = [base for base in [*named, *(bases if isinstance(bases, list) else [])] if base]
    if not isinstance(bases, list) or any(base != rotating[0] for base in rotating):
        raise CheckpointError(
            f"{LAYER_THETAS} in config.json is {shown(bases)}; expected the same base for all layers. "
            "Different bases are not supported."
        )


def _by_layer_type(
    section: dict[str, Any], family: Family, parameters: Parameters, warnings: list[str], *, stock: bool
) -> dict[str | None, Any]:
    """Apply flat fields: to all layers or, for model types with a rope per layer type, to the layers that read them."""
    bases, scaled = family.flat_bases, family.flat_scaling
    if not bases and section.get(LOCAL_THETA) is not None:
        bases, scaled = {"full_attention": "rope_theta", "sliding_attention": LOCAL_THETA}, ("full_attention",)
    if not bases and not family.layers:
        return {None: parameters}
    rope_type = rope_type_of(parameters)
    if (rope_type != "default" and not scaled) or (parameters["rope_theta"] is not None and not bases):
        raise _flat(family)
    fields, layers = {**section, "rope_theta": parameters["rope_theta"]}, layer_labels(section, family)
    ropes: dict[str | None, Any] = {}
    for label, defaults in (family.layers or {label: {} for label in bases}).items():
        rope = {"rope_type": defaults.get("rope_type", "default")}
        if label in scaled:
            # transformers 5 reads truncate only next to the layer types
            rope = {"rope_type": rope_type, **{key: parameters[key] for key in parameters if key != "truncate"}}
        share = first(section, PARTIAL_KEYS) or defaults.get("partial_rotary_factor")
        if isinstance(shares := section.get(PARTIAL_LIST), list):  # one per layer
            share = dict(zip(layers, shares, strict=False)).get(label)
        if share is not None:
            rope["partial_rotary_factor"] = share
        if family.yarn_keeps_logits and rope_type_of(rope) == "yarn":
            rope.setdefault("attention_factor", 1.0)
        base = fields.get(bases.get(label, ""))
        if isinstance(base, list):  # one per layer
            base = dict(zip(layers, base, strict=False)).get(label)
            if base is None:  # no such layer
                continue
        if family.ignores_flat_bases and base not in (None, defaults["rope_theta"]):
            warnings.append(
                f"{bases[label]} is {base}, but transformers 5 ignores it in {family.model_type} and uses "
                f"{defaults['rope_theta']:g}. A patch writes it where it is read."
            )
            base = None if stock else base
        ropes[label] = {**rope, "rope_theta": base}
    return ropes


def _flat(family: Family) -> CheckpointError:
    return CheckpointError(
        f"config.json has one set of RoPE fields, but transformers reads them of {family.model_type} by layer type. "
        f"Write rope_parameters with the keys {', '.join(family.layers)}."
    )


def _flat_parameters(
    section: dict[str, Any], new: Parameters, legacy: Parameters, theta: Any, warnings: list[str]
) -> Parameters:
    # in transformers 5 rope_scaling takes precedence; base and rotary share missing there come from the other fields
    parameters = {**(legacy or new or _dynamic_of_qwen(section))}
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = theta if theta is not None else new.get("rope_theta")
    if legacy and first(section, PARTIAL_KEYS) is None and "partial_rotary_factor" in new:
        parameters.setdefault("partial_rotary_factor", new["partial_rotary_factor"])
    if legacy and new and rope_type_of(legacy) != rope_type_of(new):
        warnings.append(
            f"rope_type is {rope_type_of(legacy)!r} in rope_scaling and {rope_type_of(new)!r} in rope_parameters; "
            "using rope_scaling, like transformers."
        )
    if new.get("rope_theta") is not None and theta is not None and new["rope_theta"] != theta:
        warnings.append(f"rope_theta is {theta} at the top level and {new['rope_theta']} in rope_parameters.")
    return parameters


def _dynamic_of_qwen(section: dict[str, Any]) -> Parameters:
    """The dynamic NTK of Qwen's own code, from seq_length to max_position_embeddings; empty if it is off."""
    lengths = section.get("seq_length"), section.get(MAX_POSITIONS)
    if section.get("use_dynamic_ntk") is not True or not all(isinstance(length, int) for length in lengths):
        return {}
    return {"rope_type": "dynamic", "factor": max(1.0, lengths[1] / max(1, lengths[0]))}  # type: ignore[operator,type-var]


def _implicit_base(family: Family, layer_type: str | None) -> float:
    theta = family.layers.get(layer_type or "", {}).get("rope_theta", family.rope_theta)
    if theta is None:
        raise CheckpointError(
            "config.json has no rope_theta, and this model type has no known default. "
            "Add the base that the model was trained with."
        )
    return theta


def rope_type_of(parameters: Parameters) -> str:
    """The rope_type of the parameters, with old names replaced."""
    rope_type = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if rope_type == "yarn" and "long_factor" in parameters:  # an early Phi-3
        return "longrope"
    return _OLD_NAMES.get(rope_type, rope_type)


def has_alpha(parameters: Parameters, family: Family) -> bool:
    """Whether `dynamic` only raises the base, for all lengths, as in Hunyuan: to rope_theta * alpha^(d/(d-2))."""
    reads = family.reads_alpha or not family.known
    return reads and rope_type_of(parameters) == "dynamic" and bool(parameters.get("alpha"))
