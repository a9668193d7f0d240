"""Reads both dialects of RoPE fields in config.json into one set of parameters.

The dialects are `rope_parameters` of transformers 5, and the older, flat `rope_theta` + `rope_scaling`
(+ `partial_rotary_factor`, and the names of bases by layer type in families.py).
"""

import math
from collections.abc import Iterator
from typing import Any

from ropecli.config.families import MSCALES, Family
from ropecli.config.fields import first
from ropecli.config.findings import Finding
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
    "xdrope_section",
    QUERY_SCALE,
    "max_position_embeddings",
    "attn_factor",  # vLLM's name for attention_factor
    "extrapolation_factor",
)
_OTHER_NAMES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}
# rope_types that transformers does not know -> how ropecli reads it, and the engines that compute it (vLLM 0.33.0,
# SGLang 0.5.23, mlx-lm 0.32.2).
ENGINE_TYPES = {
    "bailing_mrope": ("default", "vLLM computes", "unscaled frequencies, with an order of image axes of its own"),
    "openpangu": ("default", "vLLM computes", "unscaled frequencies, with an order of image axes of its own"),
    "deepseek_yarn": ("yarn", "vLLM, SGLang and mlx-lm compute", "yarn with DeepSeek's mscale"),
    "telechat3-yarn": (
        "yarn",
        "vLLM and mlx-lm compute",
        "vLLM's yarn with an attention factor of 0.07·ln s + 1 (mlx-lm: 0.1·ln s + 1)",
    ),
    "ntk": ("longrope", "vLLM computes", "a base of b·s and all frequencies divided by s^(2/d), or by mixed_b"),
}

Parameters = dict[str, Any]


def parameters_by_layer_type(
    section: dict[str, Any], family: Family, findings: list[Finding], *, stock: bool = False
) -> dict[str | None, Parameters | None]:
    """RoPE parameters by layer type; one entry under None if all layers share them.

    findings: those about these fields are added. stock: leave out what transformers ignores by mistake, and a finding
    names. Raises CheckpointError if the model type requires parameters by layer type, but config.json has one set for
    all.
    """
    new, legacy = section.get("rope_parameters") or {}, section.get("rope_scaling") or {}
    theta = first(section, THETA_KEYS)
    if theta is None:
        theta = first(section.get("attn_config") or {}, THETA_KEYS)
        if theta is not None and "rope_theta" not in new:
            message = f"attn_config sets rope_theta to {theta}, but transformers 5 ignores it and uses 10000. A patch "
            findings.append(Finding("unread-base", f"{message}writes it where it is read."))
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
            message = f"rope_scaling has `type` ({legacy['type']}) but no rope_type; transformers 5 ignores `type` in "
            findings.append(Finding("unread-type", f"{message}{family.model_type}. A patch writes rope_type."))
            legacy = {**legacy, "type": None} if stock else legacy
        flat = _flat_parameters(section, new, legacy, theta)
        ropes = _by_layer_type(section, family, flat, findings, stock=stock)
    findings += [Finding("two-scalings", message) for message in _contradictions(section, family, new, legacy)]
    findings += [Finding("engine-type", message) for message in _engine_types(ropes)]
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
    named = [first(section, THETA_KEYS), (section.get("rope_parameters") or {}).get("rope_theta")]
    rotating = [base for base in [*named, *(bases if isinstance(bases, list) else [])] if base]
    if not isinstance(bases, list) or any(base != rotating[0] for base in rotating):
        raise CheckpointError(
            f"{LAYER_THETAS} in config.json is {shown(bases)}; expected the same base for all layers. "
            "Different bases are not supported."
        )


def _by_layer_type(
    section: dict[str, Any], family: Family, parameters: Parameters, findings: list[Finding], *, stock: bool
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
            message = f"{bases[label]} is {base}, but transformers 5 ignores it in {family.model_type} and uses "
            message += f"{defaults['rope_theta']:g}. A patch writes it where it is read."
            findings.append(Finding("unread-layer-base", message))
            base = None if stock else base
        ropes[label] = {**rope, "rope_theta": base}
    return ropes


def _flat(family: Family) -> CheckpointError:
    return CheckpointError(
        f"config.json has one set of RoPE fields, but transformers reads them of {family.model_type} by layer type. "
        f"Write rope_parameters with the keys {', '.join(family.layers)}."
    )


def _flat_parameters(section: dict[str, Any], new: Parameters, legacy: Parameters, theta: Any) -> Parameters:
    # in transformers 5 rope_scaling takes precedence; base and rotary share missing there come from the other fields
    parameters = {**(legacy or new or _dynamic_of_qwen(section))}
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = theta if theta is not None else new.get("rope_theta")
    if legacy and first(section, PARTIAL_KEYS) is None and "partial_rotary_factor" in new:
        parameters.setdefault("partial_rotary_factor", new["partial_rotary_factor"])
    return parameters


def _contradictions(section: dict[str, Any], family: Family, new: Parameters, old: Parameters) -> Iterator[str]:
    """Values of rope_parameters that differ at the top level, or in rope_scaling, which transformers 5 prefers."""
    theta, base = first(section, THETA_KEYS), new.get("rope_theta")
    if base is not None and theta is not None and base != theta:
        yield f"rope_theta is {shown(theta)} at the top level and {shown(base)} in rope_parameters."
    if any(isinstance(value, dict) for value in new.values()):
        new = new.get("full_attention") or {} if family.flat_means_full else {}
    if not new or not old:
        return
    same_type = rope_type_of(new) == rope_type_of(old)
    differing: list[tuple[str, Any, Any]] = []
    if not same_type:
        differing.append(("rope_type", rope_type_of(old), rope_type_of(new)))
    for key, value in new.items():
        if key in ("type", "rope_type") or value is None:
            continue
        if key in old:
            differs = old[key] != value
        elif key in ("rope_theta", *PARTIAL_KEYS):
            # the flat fields, or else the model type's default, replace it
            differs = first(section, THETA_KEYS if key == "rope_theta" else PARTIAL_KEYS) is None
            differs = differs and value != getattr(family, key, None) and not family.layers
        else:
            # Phi-3's older dialect has only the two lists; parameters by layer type are merged, not replaced
            differs = same_type and not (family.bare_longrope or family.layers)
        if differs:
            differing.append((key, old.get(key), value))
    for key, before, after in differing:
        yield (
            f"{shown_key(key)} is {'missing from' if before is None else f'{shown(before)} in'} rope_scaling and "
            f"{shown(after)} in rope_parameters; transformers 5 uses rope_scaling."
        )


def _engine_types(ropes: dict[str | None, Parameters | None]) -> Iterator[str]:
    """Sentences about a rope_type that only engines know."""
    for kind in {written_type_of(parameters): None for parameters in ropes.values() if parameters}:
        if kind in ENGINE_TYPES:
            read_as, engines, meaning = ENGINE_TYPES[kind]
            yield (
                f"transformers has no rope_type {kind!r}. {engines} it: {meaning}. ropecli reads it as {read_as}, and "
                "cannot prove that."
            )


def _dynamic_of_qwen(section: dict[str, Any]) -> Parameters:
    """The dynamic NTK of Qwen's own code, from seq_length to max_position_embeddings; empty if it is off."""
    lengths = section.get("seq_length"), section.get(MAX_POSITIONS)
    if not section.get("use_dynamic_ntk") or None in lengths:
        return {}
    return {"rope_type": "dynamic", "factor": max(1.0, lengths[1] / lengths[0])}  # type: ignore[operator]


def _implicit_base(family: Family, layer_type: str | None) -> float:
    theta = family.layers.get(layer_type or "", {}).get("rope_theta", family.rope_theta)
    if theta is None:
        raise CheckpointError(
            "config.json has no rope_theta, and this model type has no known default. "
            "Add the base that the model was trained with."
        )
    return theta


def rope_type_of(parameters: Parameters) -> str:
    """The rope_type of the parameters as transformers calls it, if it has another name for it."""
    rope_type = written_type_of(parameters)
    if rope_type == "yarn" and "long_factor" in parameters:  # an early Phi-3
        return "longrope"
    return ENGINE_TYPES[rope_type][0] if rope_type in ENGINE_TYPES else _OTHER_NAMES.get(rope_type, rope_type)


def written_type_of(parameters: Parameters) -> str:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def translated(parameters: Parameters, width: int) -> Parameters:
    """The parameters of an engine's own rope_type, as those of the rope_type that it is read as. width: rotary_dim."""
    kind, factor = written_type_of(parameters), parameters.get("factor") or 1.0
    if kind == "telechat3-yarn":
        return {"attention_factor": 0.07 * math.log(max(1.0, factor)) + 1.0, **parameters}
    if kind == "ntk":  # https://kexue.fm/archives/9706, fixed or mixed
        pairs, power = width // 2, parameters.get("mixed_b") or 1.0
        divisors = [factor ** ((pair / pairs) ** power) for pair in range(1, pairs + 1)]
        return {"long_factor": divisors, "short_factor": divisors, "attention_factor": 1.0, **parameters}
    return parameters


def has_alpha(parameters: Parameters, family: Family) -> bool:
    """Whether `dynamic` only raises the base, for all lengths, as in Hunyuan: to rope_theta * alpha^(d/(d-2))."""
    reads = family.reads_alpha or not family.known
    return reads and rope_type_of(parameters) == "dynamic" and bool(parameters.get("alpha"))


def shown_key(key: str) -> str:
    """A config key, quoted and shortened for a message unless it is a short identifier."""
    return key if key.isidentifier() and len(key) <= 60 else shown(key)
