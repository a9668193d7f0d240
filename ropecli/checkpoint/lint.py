"""Finds settings in a checkpoint's files that stock readers silently ignore or misread. Each finding can have a fix.

Rules only read config.json and the names of files, and report only what is certain.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ropecli.checkpoint.files import ADAPTER_CONFIG, CONFIG, WEIGHTS, is_own_file
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.provenance import patch_command
from ropecli.checkpoint.state import CheckpointState
from ropecli.config.dialects import (
    KEPT_KEYS,
    NATIVE_KEYS,
    ORIGINAL_LENGTH,
    PARTIAL_KEYS,
    THETA_KEYS,
    Parameters,
    has_alpha,
    rope_type_of,
)
from ropecli.config.families import ignores_top_level, is_known
from ropecli.config.fields import first, mapping
from ropecli.errors import RopecliError, quoted, shown
from ropecli.scaling.scale import varies_with_length

_READ = {"rope_type", "type", "rope_theta", ORIGINAL_LENGTH, "finetuned", *KEPT_KEYS}  # finetuned: a note of YaRN's
_USUAL_BASE = 10000.0
_FROM_PRETRAINING_LENGTH = ("yarn", "llama3", "longrope")
# Methods with factor = target length / pretraining length; llama3's factor is not a ratio of lengths.
_BY_RATIO = ("linear", "ntk-by-parts", "yarn")


Faults = Iterator[tuple[str, str]]
"""Rule and message of each problem."""


class Finding(NamedTuple):
    """A problem. rule: the rule's name, for programs. fix: a command that fixes it, if there is one.

    changes_results: whether a reader computes something else than the files say, or positions beyond the scaling. Every
    command about running the checkpoint repeats these findings.
    """

    rule: str
    message: str
    fix: str | None
    changes_results: bool


_NOT_FIXED = (
    *("outside-text-config", "switches-with-length", "sliding-window", "global-layers-without-rope"),
    "adapter-beside-model",
)
"""Rules whose findings a patch does not fix."""
_SAME_RESULTS = (
    *("null-head-dim", "old-name", "context-below-scaling", "tokenizer-caps", "sliding-window"),
    "global-layers-without-rope",
)
"""Rules whose findings change no result: readers fail, stop earlier, or compute what the model was made for."""


def find_faults(state: CheckpointState) -> list[Finding]:
    """All findings of the rules."""
    faults = [("unclear", warning) for warning in state.warnings]
    faults += [fault for rule in _RULES for fault in rule(state)]
    fix = fix_command(state) if any(name not in _NOT_FIXED for name, _ in faults) else None
    return [
        Finding(name, message, None if name in _NOT_FIXED else fix, name not in _SAME_RESULTS)
        for name, message in faults
    ]


def faults_in_results(state: CheckpointState) -> tuple[Finding, ...]:
    """The findings that change what is computed."""
    return tuple(finding for finding in find_faults(state) if finding.changes_results)


def _only_new_dialect(state: CheckpointState) -> Faults:
    section, main, family = state.section, state.positions.main, state.settings.family
    # model types with a rope per layer type have no older dialect, unless they read flat fields
    if not section.get("rope_parameters") or family.new or (family.layers and not family.flat_means_full):
        return
    default = family.layers.get("full_attention", {}).get("rope_theta") or family.rope_theta or _USUAL_BASE
    lost = []
    if main.rope_theta != default and first(section, THETA_KEYS) is None:
        lost.append(f"the base {main.rope_theta:g} (they use {default:g})")
    scales = main.spec.method.name != "none" and main.remapping is None
    if scales and main.rope_theta == main.geometry.rope_theta and not section.get("rope_scaling"):
        lost.append(f"the scaling by {main.spec.method}")
    head, width = main.geometry.head_dim, main.geometry.rotary_dim
    if width not in (head, int(head * (family.partial_rotary_factor or 1))) and first(section, PARTIAL_KEYS) is None:
        lost.append("partial_rotary_factor")
    if lost:
        yield (
            "one-dialect",
            f"older readers ignore {' and '.join(lost)}, which only rope_parameters has. Write both dialects.",
        )


def _stale_rope_scaling(state: CheckpointState) -> Faults:
    new, old = state.section.get("rope_parameters"), state.section.get("rope_scaling")
    if not isinstance(new, dict) or not isinstance(old, dict) or not new or not old:
        return
    if any(isinstance(value, dict) for value in new.values()):
        if not state.settings.family.flat_means_full:
            return
        new = mapping(new, "full_attention")
    for key in sorted(_overruled(state, new, old)):
        there = f"{shown(old[key])} in rope_scaling" if key in old else "missing from rope_scaling"
        yield (
            "two-scalings",
            f"{_key_shown(key)} is {there} and {shown(new[key])} in rope_parameters; transformers 5 uses rope_scaling.",
        )


def _overruled(state: CheckpointState, new: Parameters, old: Parameters) -> Iterator[str]:
    """Keys of rope_parameters that differ in rope_scaling, which takes precedence in transformers 5."""
    family = state.settings.family
    for key, value in new.items():
        if key in ("type", "rope_type") or value is None:
            continue
        if key in old:
            differs = old[key] != value
        elif key in ("rope_theta", *PARTIAL_KEYS):
            # the flat fields, or else the model type's default, replace it
            differs = first(state.section, THETA_KEYS if key == "rope_theta" else PARTIAL_KEYS) is None
            differs = differs and value != getattr(family, key, None) and not family.layers
        else:
            # Phi-3's older dialect has only the two lists; parameters by layer type are merged, not replaced
            differs = rope_type_of(new) == rope_type_of(old) and not (family.bare_longrope or family.layers)
        if differs:
            yield key


def _outside_of_text_config(state: CheckpointState) -> Faults:
    config, section = state.checkpoint.config, state.section
    if ignores_top_level(config):
        message = (
            "config.json has no text_config: transformers ignores the fields of the language model and uses the "
            f"defaults of {config['model_type']}. Use a conversion of the model to transformers' format."
        )
        yield "outside-text-config", message
    if section is config:
        return
    names = ("rope_parameters", "rope_scaling", *THETA_KEYS)
    stray = [name for name in names if config.get(name) is not None and config[name] != section.get(name)]
    if stray:
        message = (
            f"{', '.join(stray)} outside of text_config: the text model only reads text_config. Move the correct "
            "values there, and remove the others."
        )
        yield "outside-text-config", message


def _names(state: CheckpointState) -> Faults:
    if state.section.get("head_dim", 0) is None and not state.settings.family.fills_head_dim:
        yield "null-head-dim", "head_dim is null; transformers 5 fails on that with yarn, longrope and dynamic."
    for label, parameters in _rope_fields(state):
        rope_type, named = rope_type_of(parameters), parameters.get("rope_type") or parameters.get("type")
        if named and named not in (rope_type, "mrope"):  # transformers 5 reads mrope as default
            message = f"the rope_type in {label} is {shown(named)}; transformers 5 only supports the new name, "
            yield "old-name", f"{message}{rope_type!r}."
        if not parameters.get("mscale_all_dim") or not _scales_softmax(state):
            continue
        if rope_type not in ("yarn", "default"):
            message = (
                f"mscale_all_dim in {label} is left over from yarn; with rope_type {rope_type!r} it still multiplies "
                "the softmax scale of DeepSeek models."
            )
            yield "mscale-left-over", message
        elif parameters.get("attention_factor") is not None:
            message = f"attention_factor and mscale_all_dim in {label} are both applied, so logits are scaled twice."
            yield "attention-factor-twice", message


def _unread_keys(state: CheckpointState) -> Faults:
    family = state.settings.family
    for label, parameters in _rope_fields(state):
        rope_type = rope_type_of(parameters)
        read = {*NATIVE_KEYS.get(rope_type, ()), *_READ, *(["alpha"] if has_alpha(parameters, family) else [])}
        for key, value in parameters.items():
            if key in read or isinstance(value, dict | None) or (key == "mscale_all_dim" and _scales_softmax(state)):
                continue
            meant = difflib.get_close_matches(key, sorted({*NATIVE_KEYS.get(rope_type, ())}), n=1)
            hint = ""
            if key in sum(NATIVE_KEYS.values(), ()):
                pass  # not a typo, but another rope_type's key
            elif meant:
                setting = str(value).lower() if isinstance(value, bool) else shown(value)
                hint = f" Did you mean {meant[0]}? Then add --set {quoted(f'{meant[0]}={setting}')}."
            elif not family.known:
                continue  # the checkpoint's own code may read it
            message = f"{_key_shown(key)} in {label} is ignored for rope_type {rope_type!r}.{hint}"
            yield "unread-key", message
        if parameters.get("truncate") is False and "." in label:
            message = (
                f"truncate in {label} is ignored: transformers 5 reads it next to the layer types. To apply it, add "
                "--set truncate=false."
            )
            yield "unread-key", message


def _scales_softmax(state: CheckpointState) -> bool:
    """Return whether the model's code multiplies the softmax scale by mscale_all_dim, or may do so."""
    return state.settings.family.reads_mscale_all_dim or not state.settings.family.known


def _lengths(state: CheckpointState) -> Faults:
    spec, written, context = state.positions.main.spec, state.max_position_embeddings, state.positions.context_length
    for label, inside in _overruled_lengths(state):
        message = (
            f"{ORIGINAL_LENGTH} is {shown(state.section[ORIGINAL_LENGTH])} at the top level and {shown(inside)} in "
        )
        yield "conflicting-pretraining-lengths", f"{message}{label}; transformers 5 uses the top level."
    if spec.method.name == "dynamic" and (smaller := _unread_lengths(state)):
        message = (
            f"dynamic uses max_position_embeddings, {written}, as the pretraining length and does not scale shorter "
            f"inputs; {ORIGINAL_LENGTH} {smaller[0]} is ignored."
        )
        yield "dynamic-switched-off", message
    if varies_with_length(state.positions.main):
        message = (
            f"{spec.method} has different frequencies for short and long inputs here. In transformers, batches of "
            "mixed lengths, chunked prefill, and a KV cache that grows past the pretraining length are inexact."
        )
        yield "switches-with-length", message
    scaling = (
        f"max_position_embeddings is {written}, but {spec.method} ×{spec.factor:g} extends the pretraining length of "
        f"{state.positions.pretraining_length} to {state.positions.main.scaled_length}."
    )
    if _falls_short(state):
        advice = "The fix raises the factor; if the model was trained with this factor, lower max_position_embeddings"
        yield "context-beyond-scaling", f"{scaling} {advice} instead."
    if _stops_early(state):
        yield "context-below-scaling", f"{scaling} Inference engines stop at the smaller."
    longest = (state.checkpoint.tokenizer_config or {}).get("model_max_length")
    if isinstance(longest, int | float) and not isinstance(longest, bool) and longest < context:
        message = (
            f"the tokenizer's model_max_length is {longest:g} tokens, below the context length of {context}: longer "
            "inputs are truncated or cause a warning."
        )
        yield "tokenizer-caps", message


def _sliding(state: CheckpointState) -> Faults:
    sliding = state.settings.widest_window
    if sliding is not None and sliding < state.max_position_embeddings:
        message = f"no layer sees further than {sliding} tokens, so extending the context has no effect."
        yield "sliding-window", message
    elif not any(rope.far for rope in state.settings.ropes):
        message = (
            "only layers with a sliding or chunked window have rotary embeddings; layers that see the whole context "
            "have no positions to scale. patch --method none --target-length N only raises the context length."
        )
        yield "global-layers-without-rope", message


def _other_formats(state: CheckpointState) -> Faults:
    folder = state.checkpoint.folder
    if any(Path(name).match(WEIGHTS) for name in state.checkpoint.skipped_files()):
        names = ", ".join(state.checkpoint.skipped_files())
        message = (
            f"engines such as vLLM read {names} in place of config.json and its weights. A patch does not copy them."
        )
        yield "mistral-format", message
    if is_own_file(folder / ADAPTER_CONFIG):
        message = (
            f"{ADAPTER_CONFIG} is beside a whole model: transformers adds the adapter to the model or, from the Hub, "
            "loads the base model that it names. Other engines ignore it. Move it to another folder."
        )
        yield "adapter-beside-model", message


_RULES = (
    _only_new_dialect,
    _stale_rope_scaling,
    _outside_of_text_config,
    _names,
    _unread_keys,
    _lengths,
    _sliding,
    _other_formats,
)


def _rope_fields(state: CheckpointState) -> list[tuple[str, Parameters]]:
    """All sets of RoPE parameters in config.json, each with its key path."""
    fields: list[tuple[str, Parameters]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = state.section.get(key)
        if isinstance(value, dict):
            nested = [
                (f"{key}.{_key_shown(label)}", inner) for label, inner in value.items() if isinstance(inner, dict)
            ]
            fields += nested or [(key, value)]
    return fields


def _falls_short(state: CheckpointState) -> bool:
    """Return whether max_position_embeddings is longer than the scaling reaches."""
    main = state.positions.main
    longer = state.max_position_embeddings > main.scaled_length
    return main.spec.method.name in _BY_RATIO and longer and not state.guesses_pretraining_length


def _stops_early(state: CheckpointState) -> bool:
    """Return whether max_position_embeddings is shorter than the scaling reaches."""
    method, shorter = state.positions.main.spec.method, state.max_position_embeddings < state.positions.context_length
    return method.name in (*_BY_RATIO, "longrope") and shorter and not state.guesses_pretraining_length


def _overruled_lengths(state: CheckpointState) -> list[tuple[str, Any]]:
    """Key path and value of each pretraining length that the top-level one overrides."""
    stray = state.section.get(ORIGINAL_LENGTH)
    return [
        (label, parameters[ORIGINAL_LENGTH])
        for label, parameters in _rope_fields(state)
        # for parameters by layer type, the top-level one is not read
        if "." not in label and rope_type_of(parameters) in _FROM_PRETRAINING_LENGTH
        if stray is not None and parameters.get(ORIGINAL_LENGTH) not in (None, stray)
    ]


def _unread_lengths(state: CheckpointState) -> list[int]:
    """Pretraining lengths in config.json below max_position_embeddings; dynamic NTK ignores them."""
    lengths = [
        fields.get(ORIGINAL_LENGTH) for fields in (state.section, *(fields for _, fields in _rope_fields(state)))
    ]
    limit = state.max_position_embeddings
    return [length for length in lengths if type(length) is int and 0 < length < limit]


def fix_command(state: CheckpointState) -> str | None:
    """The patch command that writes the same scaling again, which fixes everything that a patch can fix.

    None if `patch` would refuse it, for example a distance method without ropecli.yaml.
    """
    main, note = state.positions.main, state.note
    if main.remapping is not None and note is None:
        return None
    spec, options = main.spec, _fixing_lengths(state)
    if note and main.geometry.layer_type not in note.layer_types:
        spec = note.spec()
        options["layer_types"] = ",".join(map(str, note.layer_types))
    lengths = {key: value for key, value in options.items() if isinstance(value, int)}
    labels = options["layer_types"].split(",") if "layer_types" in options else None
    try:
        plan = make_plan(state.checkpoint, spec, layer_types=labels, choose_factor=_falls_short(state), **lengths)
    except RopecliError:
        return None
    if plan.unwritable:
        return None
    checkpoint, by_length = state.checkpoint, _falls_short(state) or spec.method.name == "none"
    return patch_command(
        checkpoint.name,
        checkpoint.revision,
        spec.method.name,
        None if by_length else spec.factor,
        spec.params,
        factors_file=checkpoint.folder / CONFIG,
        options=options if is_known(checkpoint.config) else {**options, "no_verify": None},
    )


def _fixing_lengths(state: CheckpointState) -> dict[str, Any]:
    """Options that set the true pretraining length and keep the context length."""
    if state.guesses_pretraining_length:
        return {"original_length": "N"}
    main, written = state.positions.main, state.max_position_embeddings
    if main.spec.method.name == "dynamic":
        unread = _unread_lengths(state)
        return {"original_length": unread[0]} if unread else {}
    lengths, pretraining_length = {}, state.positions.pretraining_length
    if _overruled_lengths(state):
        lengths["original_length"] = pretraining_length
    if written != main.scaled_length and written >= pretraining_length and not _stops_early(state):
        lengths["target_length"] = written
    return lengths


def _key_shown(key: str) -> str:
    """A config key, quoted and shortened for a message unless it is a short identifier."""
    return key if key.isidentifier() and len(key) <= 60 else shown(key)
