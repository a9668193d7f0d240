"""Reads the RoPE settings of config.json: geometry and scaling of each layer type, and findings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ropecli.config.dialects import (
    LOCAL_THETA,
    MAX_POSITIONS,
    MSCALE_PAIR,
    NATIVE_KEYS,
    ORIGINAL_LENGTH,
    PARTIAL_KEYS,
    QUERY_SCALE,
    THETA_KEYS,
    Parameters,
    has_alpha,
    parameters_by_layer_type,
    rope_type_of,
    translated,
)
from ropecli.config.families import MSCALES, Family, family_of
from ropecli.config.fields import check_fields, entries, first, head_dim, number_of, rotary_dim, section_of
from ropecli.config.findings import DEFAULT_BASE, NO_LENGTH, TEXT_TRUNCATE, Finding
from ropecli.config.layers import Layer, read_layers
from ropecli.config.makers import Makers, find_makers, released_bases
from ropecli.errors import CheckpointError, did_you_mean, shown
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method
from ropecli.scaling.spec import ScaledRope, ScalingSpec, scale

_ROPE_KEYS = ("rope_parameters", "rope_scaling", *THETA_KEYS, *PARTIAL_KEYS[1:])


@dataclass(frozen=True)
class ConfiguredRope:
    """One rotary embedding in config.json; `geometry.layer_type` is None if all layers share it.

    far: whether some of its layers see the whole context, so that scaling makes sense.
    """

    geometry: RopeGeometry
    spec: ScalingSpec
    far: bool


@dataclass(frozen=True)
class RopeSettings:
    """The RoPE settings of config.json. findings: about missing or contradictory values.

    parameters: as they were read, by layer type; None for one without rotary embeddings. makers: what the makers say of
    the model; None if unknown, or overruled by --original-length or ropecli.yaml. config_length: the pretraining length
    that config.json alone gives, tokens. unscaled: what the makers say without the scaling in config.json. layers: see
    read_layers. default_base: a sentence if no field names the base, unless a finding says so.
    """

    ropes: tuple[ConfiguredRope, ...]
    parameters: Mapping[str | None, Parameters | None]
    max_position_embeddings: int
    family: Family
    findings: tuple[Finding, ...]
    makers: Makers | None = None
    config_length: int = 0
    unscaled: Makers | None = None
    layers: tuple[Layer, ...] = ()
    default_base: str = ""

    @property
    def guesses_pretraining_length(self) -> bool:
        """Whether config.json has a scaling without its pretraining length, and the makers are not known."""
        return any(finding.rule == NO_LENGTH for finding in self.findings)

    @property
    def overruled_by(self) -> Makers | None:
        """The makers, if config.json scales from another pretraining length than theirs."""
        theirs = None if self.makers or self.guesses_pretraining_length else self.unscaled
        return theirs if theirs and theirs.pretraining_length != self.config_length else None

    @property
    def known_makers(self) -> Makers | None:
        """What the makers say, whether config.json agrees with them or not."""
        return self.makers or self.overruled_by

    @property
    def context_length(self) -> int:
        """Tokens that the model reads: the larger of max_position_embeddings and the scaled length.

        Qwen's model cards add yarn without raising max_position_embeddings; so does dynamic. The factor of llama3 is
        not a ratio of lengths, nor is Gemma 3's linear ×8, for 32,768 to 131,072 tokens: a max_position_embeddings
        above the pretraining length is linear's context length.
        """
        ropes = [rope for rope in self.ropes if rope.far] or self.ropes
        rope = max(ropes, key=lambda rope: rope.spec.factor)
        original, method = rope.geometry.original_max_position_embeddings, rope.spec.method.name
        if method == "linear":
            raised = self.max_position_embeddings > original
        else:
            raised = method in ("none", "llama3") or self.guesses_pretraining_length
        scaled = round(original * rope.spec.factor)
        return self.max_position_embeddings if raised else max(self.max_position_embeddings, scaled)

    def scaled(self) -> dict[str | None, ScaledRope]:
        """The ropes by layer type, as config.json scales them. Raises MethodError."""
        return {rope.geometry.layer_type: scale(rope.geometry, rope.spec.checked()) for rope in self.ropes}


def read_settings(config: dict[str, Any], original_length: int | None = None, *, stock: bool = False) -> RopeSettings:
    """Read the RoPE settings of config.json, in either dialect.

    stock: as transformers reads them, where it ignores a field by mistake, and without what the makers say.
    The pretraining length is `original_length`, tokens, if given; else that of the scaling in config.json; else that
    of the makers; else max_position_embeddings. Raises CheckpointError for a model without rotary embeddings, and for
    invalid values.
    """
    section, family = section_of(config), family_of(config)
    check_fields(config, family)
    _refuse_without_rope(config, section, family)
    findings: list[Finding] = []
    max_positions = number_of(section, family, MAX_POSITIONS)
    if original_length and original_length > max_positions:
        message = f"--original-length {original_length} is above max_position_embeddings, {max_positions}."
        findings.append(Finding("wrong-original-length", message))
    by_layer_type = parameters_by_layer_type(section, family, findings, stock=stock)
    rotating = {label: parameters for label, parameters in by_layer_type.items() if parameters is not None}
    # the parameters of the layers that see the whole context, or else of the others
    far = [parameters for label, parameters in rotating.items() if family.sees_whole_context(label)]
    main, makers, unscaled = next(iter(far or rotating.values()), None), None, None
    if main and not original_length and not stock:
        read = {"rope_theta": main["rope_theta"], "max_position_embeddings": max_positions}
        scaling, factor = _read_method(main, family), main.get("factor") or 1
        makers = find_makers(section, family.model_type, scaling=scaling, factor=factor, **read)
        unscaled = makers or find_makers(section, family.model_type, scaling="none", factor=1, **read)
    layers = read_layers(section, family, rotating)
    named = {label: _named_length(section, parameters, family, label) for label, parameters in rotating.items()}
    ropes = []
    for label, parameters in rotating.items():
        length = original_length or named[label]
        if length is None and makers is None:
            findings += _no_length(parameters, family, max_positions, unscaled)
        if isinstance(text := parameters.get("truncate"), str):
            message = f"truncate is the text {text!r}, which transformers takes as true. Write true or false."
            findings.append(Finding(TEXT_TRUNCATE, message))
        original = length or (makers.pretraining_length if makers else max_positions)
        is_far = _is_far(label, layers, family)
        ropes.append(_read_rope(section, family, parameters, label, original, max_positions, is_far))
    if original_length is None:
        findings += _ignored_lengths(section, by_layer_type, ropes)
    in_config = makers.pretraining_length if makers and makers.in_config else max_positions
    config_length = next((length for length in named.values() if length), in_config)
    default_base, wrong_base = _default_base(section, family, main)
    findings += [wrong_base] if wrong_base else []
    return RopeSettings(
        ropes=tuple(ropes),
        parameters=by_layer_type,
        max_position_embeddings=max_positions,
        family=family,
        findings=tuple(dict.fromkeys(findings)),
        makers=makers,
        config_length=config_length,
        unscaled=unscaled,
        layers=layers,
        default_base=default_base,
    )


def _is_far(layer_type: str | None, layers: Sequence[Layer], family: Family) -> bool:
    """Whether some layer that sees the whole context rotates by this rope, or may."""
    rotated = [layer.far for layer in layers if layer.rope == layer_type and layer.rotates is not False]
    return any(rotated) if rotated or layer_type is None else family.sees_whole_context(layer_type)


def _default_base(section: dict[str, Any], family: Family, parameters: Parameters | None) -> tuple[str, Finding | None]:
    """A sentence if no field names the base; or a finding, if released models have another one than the default."""
    named = any(value and ("rope_theta" in key or key in (*THETA_KEYS, LOCAL_THETA)) for key, value in entries(section))
    if named or parameters is None:
        return "", None
    base, others = parameters["rope_theta"], released_bases(section, family.model_type)
    sentence = f"config.json names no base (rope_theta): {base:,.10g} is the default of {family.model_type}."
    if not others or base in others:
        return sentence, None
    released = " or ".join(f"{other:,.10g}" for other in sorted(others))
    advice = f"Released models of this kind have {released}. Write rope_theta into config.json."
    return "", Finding(DEFAULT_BASE, f"{sentence} {advice}")


def _refuse_without_rope(config: dict[str, Any], section: dict[str, Any], family: Family) -> None:
    model_type = config.get("model_type")
    if section.get("alibi"):
        raise CheckpointError("The model uses ALiBi (`alibi` in config.json), not rotary embeddings.")
    if family.refused:
        raise CheckpointError(f"{model_type} is not supported: {family.refused}.")
    if not family.rotary:
        what = "has no rotary position embedding to configure, so no scaling applies"
        raise CheckpointError(f"model_type {shown(model_type)} {what}.")
    if family.switch and section.get(family.switch[0]) != family.switch[1]:
        key, value = family.switch
        raise CheckpointError(f"This {model_type} has no rotary positions: {key} in config.json is not {value!r}.")
    silent = all(section.get(key) is None for key in _ROPE_KEYS)
    if family.scaled and not (section.get("rope_parameters") or section.get("rope_scaling")):
        raise CheckpointError(
            f"config.json has neither rope_parameters nor rope_scaling, and {model_type} is scaled by default. Save "
            "the model again with transformers, which writes rope_parameters."
        )
    if silent and family.rope_theta is None and not family.layers:
        keys = ", ".join(_ROPE_KEYS)
        code = "custom code (auto_map)" if config.get("auto_map") else "custom code"
        raise CheckpointError(
            f"config.json has no RoPE field that ropecli knows ({keys}), and transformers has no language model of "
            f"type {shown(model_type)}. The rotary settings may be in its {code}, where ropecli cannot change them. "
            "Use a conversion of the model to a type of transformers, if there is one."
        )


def _read_rope(
    section: dict[str, Any],
    family: Family,
    parameters: Parameters,
    layer_type: str | None,
    original: int,
    max_positions: int,
    far: bool,
) -> ConfiguredRope:
    """original: the pretraining length, tokens."""
    head = head_dim(section, family, layer_type)
    share = rotary_share(section, family, parameters, layer_type)
    still = 0
    if rope_type_of(parameters) == "proportional":
        still = head // 2 - int((1.0 if share is None else share) * head // 2)
        share = None
    width = rotary_dim(section, head, share)
    parameters, method = translated(parameters, width), _read_method(parameters, family)
    if isinstance(text := parameters.get("truncate"), str):
        parameters = {**parameters, "truncate": bool(text)}
    theta = parameters["rope_theta"]
    if has_alpha(parameters, family) and width > 2:
        theta *= parameters["alpha"] ** (width / (width - 2))
    if not 1 < theta < math.inf:
        raise CheckpointError(f"rope_theta in config.json is {theta:g}; expected a base above 1.")
    geometry = RopeGeometry(head, width, theta, original, layer_type, still)
    return ConfiguredRope(geometry, _read_spec(parameters, method, max_positions / original, family), far)


def _no_length(
    parameters: Parameters, family: Family, max_positions: int, unscaled: Makers | None
) -> Iterator[Finding]:
    """A finding about a scaling without a pretraining length."""
    method = _read_method(parameters, family)
    if method in ("none", "dynamic"):
        return
    read = f", so it reads {round(max_positions * (parameters.get('factor') or 1))}" if method == "linear" else ""
    named = f" {unscaled.pretraining_length} ({unscaled.source})" if unscaled else ""
    message = f"config.json scales by {method} but has no pretraining length; using max_position_embeddings, "
    yield Finding(NO_LENGTH, f"{message}{max_positions}{read}. Correct it with patch --original-length{named}.")


def rotary_share(section: dict[str, Any], family: Family, parameters: Parameters, layer_type: str | None) -> Any:
    """partial_rotary_factor from config.json or the model type's default; None if the whole head rotates."""
    share = parameters.get("partial_rotary_factor", first(section, PARTIAL_KEYS))
    if share is None and family.known:
        defaults = family.layers.get(layer_type or "", {})
        share = defaults.get("partial_rotary_factor", family.partial_rotary_factor)
        if family.reads_rotary_dim and section.get("rotary_dim") is not None:
            share = section["rotary_dim"] / head_dim(section, family, layer_type)
    return share


def _read_method(parameters: Parameters, family: Family) -> str:
    rope_type = rope_type_of(parameters)
    if rope_type not in NATIVE_KEYS:
        known, hint = ", ".join(NATIVE_KEYS), did_you_mean(rope_type, NATIVE_KEYS)
        raise CheckpointError(f"Unknown rope_type {shown(rope_type)} in config.json. Known: {known}.{hint}")
    if rope_type == "default" or has_alpha(parameters, family):
        return "none"
    if rope_type == "proportional":
        return "none" if parameters.get("factor") in (None, 1) else "linear"
    without_temperature = parameters.get("attention_factor") == 1.0 and not family.yarn_keeps_logits
    return "ntk-by-parts" if rope_type == "yarn" and without_temperature else rope_type


def _read_spec(parameters: Parameters, method: str, implied_factor: float, family: Family) -> ScalingSpec:
    """The scaling in config.json. Not checked, because a patch can replace an invalid one.

    implied_factor: max_position_embeddings ÷ pretraining length, which transformers uses for yarn and longrope without
    a factor.
    """
    if method == "none":
        return ScalingSpec(find_method(method))
    factor = parameters.get("factor")
    if factor is None:
        factor = max(1.0, implied_factor)
    params = {key: parameters[key] for key in find_method(method).signature if parameters.get(key) is not None}
    paired = all(parameters.get(key) for key in MSCALE_PAIR)
    for key in MSCALE_PAIR:
        # one without the other has no effect, and in transformers attention_factor takes precedence
        if not paired or "attention_factor" in params:
            params.pop(key, None)
    reads_mscales = family.reads_mscales or not family.known
    if method == "longrope" and reads_mscales and parameters.get(MSCALES[1]) is not None:
        params.setdefault("attention_factor", parameters[MSCALES[1]])
    return ScalingSpec(find_method(method), factor, params)


def _named_length(
    section: dict[str, Any], parameters: Parameters, family: Family, layer_type: str | None
) -> int | None:
    """The pretraining length in config.json as transformers reads it, tokens; None if it reads none."""
    method = _read_method(parameters, family)
    if method == "dynamic" or (method == "none" and QUERY_SCALE not in parameters):
        return None  # transformers always uses max_position_embeddings here
    # transformers 5 prefers the top-level key, except for ropes by layer type and for QUERY_SCALE
    by_layer_type = layer_type is not None and ORIGINAL_LENGTH in NATIVE_KEYS[rope_type_of(parameters)]
    places = (parameters,) if by_layer_type or method == "none" else (section, parameters)
    return next((length for place in places if (length := place.get(ORIGINAL_LENGTH)) is not None), None)


def _ignored_lengths(
    section: dict[str, Any], parameters: dict[str | None, Parameters | None], ropes: list[ConfiguredRope]
) -> Iterator[Finding]:
    """Findings about a pretraining length in config.json that is not used, as in transformers."""
    far = [rope for rope in ropes if rope.far]
    scaled = [rope for rope in far if rope.spec.method.name != "none"]
    for geometry in (rope.geometry for rope in scaled or far):
        for place in (section, parameters[geometry.layer_type] or {}):
            named, used = place.get(ORIGINAL_LENGTH), geometry.original_max_position_embeddings
            if named not in (None, used):
                what = f"Ignoring {ORIGINAL_LENGTH} {shown(named)}, like transformers; the pretraining length is {used}"
                yield Finding("unread-length", f"{what}. Correct it with patch --original-length.")
