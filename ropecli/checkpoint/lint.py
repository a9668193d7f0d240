"""What in a checkpoint's files is read otherwise than it looks, or by nobody: findings, each with its mend.

Each rule names a trap that stock readers fall into without a word. Rules read config.json as it stands; they change
nothing, and what they cannot tell they leave alone.
"""

import difflib
from collections.abc import Iterator
from typing import NamedTuple

from ropecli.checkpoint.fixes import (
    falls_short,
    fix_command,
    key_shown,
    overruled_lengths,
    rope_fields,
    stops_early,
    unread_lengths,
)
from ropecli.checkpoint.plan_warnings import mixes_layers, moot_sliding_window
from ropecli.checkpoint.state import CheckpointState
from ropecli.config.dialects import (
    KEPT_KEYS,
    NATIVE_KEYS,
    ORIGINAL_LENGTH,
    PARTIAL_KEYS,
    THETA_KEYS,
    Parameters,
    rope_type_of,
)
from ropecli.config.fields import first, mapping
from ropecli.errors import shown
from ropecli.scaling.scale import varies_with_length

_READ = {"rope_type", "type", "rope_theta", ORIGINAL_LENGTH, *KEPT_KEYS}
_USUAL_BASE = 10000.0


class Finding(NamedTuple):
    """One thing that is off. rule: its name, for programs. fix: a command that mends it; None where none does."""

    rule: str
    message: str
    fix: str | None = None


def find_faults(state: CheckpointState) -> list[Finding]:
    """Everything that the rules find, and what the reading itself warned of."""
    return [finding for rule in _RULES for finding in rule(state)]


def _unclear(state: CheckpointState) -> Iterator[Finding]:
    """What the reading of config.json itself warned of."""
    for warning in state.warnings:
        usual = f"names no rope_theta; models of this type have {_USUAL_BASE:g}"
        if not any(f"{usual}{end}" in warning for end in (".", " in layers")):  # every reader takes that one
            yield Finding("unclear", warning, fix_command(state))


def _only_new_dialect(state: CheckpointState) -> Iterator[Finding]:
    section, main, family = state.section, state.main, state.settings.family
    # a type with a rope for each layer type has no older dialect, but for those that read flat fields
    if not section.get("rope_parameters") or (family.layers and not family.flat_means_full):
        return
    taken = family.layers.get("full_attention", {}).get("rope_theta") or family.rope_theta or _USUAL_BASE
    lost = []
    if main.rope_theta != taken and first(section, THETA_KEYS) is None:
        lost.append(f"the base {main.rope_theta:g} (they take {taken:g})")
    scales = main.spec.method.name != "none" and main.remapping is None
    if scales and main.rope_theta == main.geometry.rope_theta and not section.get("rope_scaling"):
        lost.append(f"the scaling by {main.spec.method}")
    head, width = main.geometry.head_dim, main.geometry.rotary_dim
    if width not in (head, int(head * (family.partial_rotary_factor or 1))) and first(section, PARTIAL_KEYS) is None:
        lost.append("the share of the head that turns")
    if lost:
        yield Finding(
            "one-dialect",
            f"older readers find no word of {', nor of '.join(lost)}: write both dialects.",
            fix_command(state),
        )


def _stale_rope_scaling(state: CheckpointState) -> Iterator[Finding]:
    new, old = state.section.get("rope_parameters"), state.section.get("rope_scaling")
    if not isinstance(new, dict) or not isinstance(old, dict) or not new or not old:
        return
    if any(isinstance(one, dict) for one in new.values()):
        if not state.settings.family.flat_means_full:
            return
        new = mapping(new, "full_attention")
    for key in sorted(_overruled(state, new, old)):
        there = f"{shown(old[key])} in rope_scaling" if key in old else "missing in rope_scaling"
        yield Finding(
            "two-scalings",
            f"{key_shown(key)} is {there} and {shown(new[key])} in rope_parameters; transformers 5 follows "
            "rope_scaling.",
            fix_command(state),
        )


def _overruled(state: CheckpointState, new: Parameters, old: Parameters) -> Iterator[str]:
    """Keys of rope_parameters that rope_scaling, which transformers 5 takes in its place, gives otherwise."""
    family = state.settings.family
    for key, value in new.items():
        if key in ("type", "rope_type") or value is None:
            continue
        if key in old:
            differs = old[key] != value
        elif key in ("rope_theta", *PARTIAL_KEYS):
            # what the flat fields name is put in its place, or else the type's default
            differs = first(state.section, THETA_KEYS if key == "rope_theta" else PARTIAL_KEYS) is None
            differs = differs and value != getattr(family, key, None) and not family.layers
        else:
            # Phi-3's older dialect knows two lists alone, and a nest is added to, not replaced
            differs = rope_type_of(new) == rope_type_of(old) and not (family.bare_longrope or family.layers)
        if differs:
            yield key


def _outside_of_text_config(state: CheckpointState) -> Iterator[Finding]:
    config, section = state.checkpoint.config, state.section
    if section is config:
        return
    names = ("rope_parameters", "rope_scaling", *THETA_KEYS)
    stray = [name for name in names if config.get(name) is not None and config[name] != section.get(name)]
    if stray:
        stands = "stands" if len(stray) == 1 else "stand"
        message = (
            f"{', '.join(stray)} {stands} beside text_config, and the text model reads what is inside of it alone. "
            "Move into it what is meant, and remove the rest."
        )
        yield Finding("outside-text-config", message)


def _stray_original_length(state: CheckpointState) -> Iterator[Finding]:
    for label, inside in overruled_lengths(state):
        yield Finding(
            "two-original-windows",
            f"{ORIGINAL_LENGTH} is {shown(state.section[ORIGINAL_LENGTH])} at the top and {shown(inside)} in {label}; "
            "transformers 5 takes the one at the top.",
            fix_command(state),
        )


def _null_head_dim(state: CheckpointState) -> Iterator[Finding]:
    section = state.section
    if "head_dim" in section and section["head_dim"] is None and not state.settings.family.fills_head_dim:
        message = "head_dim is null, on which transformers 5 stops under yarn, longrope and dynamic."
        yield Finding("null-head-dim", message, fix_command(state))


def _old_names(state: CheckpointState) -> Iterator[Finding]:
    for label, parameters in rope_fields(state):
        named = parameters.get("rope_type") or parameters.get("type")
        if named and named != rope_type_of(parameters):
            yield Finding(
                "old-name",
                f"{label} calls its type {shown(named)}; transformers 5 knows these keys as "
                f"{rope_type_of(parameters)!r} alone.",
                fix_command(state),
            )


def _unread_keys(state: CheckpointState) -> Iterator[Finding]:
    family = state.settings.family
    for label, parameters in rope_fields(state):
        rope_type = rope_type_of(parameters)
        read = {*NATIVE_KEYS.get(rope_type, ()), *_READ}
        for key, value in parameters.items():
            if key in read or isinstance(value, dict | None) or (key == "mscale_all_dim" and _scales_softmax(state)):
                continue
            meant = difflib.get_close_matches(key, sorted({*NATIVE_KEYS.get(rope_type, ())}), n=1)
            hint = f" Did you mean {meant[0]}? Then add --set {meant[0]}={_short(value)}." if meant else ""
            if key in sum(NATIVE_KEYS.values(), ()):
                hint = ""  # no slip of the pen, but another type's
            elif not (family.known or meant):
                continue  # code of its own may read it
            message = f"{key_shown(key)} in {label} is not read under rope_type {rope_type!r}.{hint}"
            yield Finding("unread-key", message, fix_command(state))
        if parameters.get("truncate") is False and "." in label:
            message = (
                f"truncate in {label} is not read: transformers 5 looks for it beside the layer types. To give it "
                "effect, add --set truncate=false."
            )
            yield Finding("unread-key", message, fix_command(state))


def _scales_softmax(state: CheckpointState) -> bool:
    """Whether the model's own code multiplies its softmax scale by mscale_all_dim, or may do so."""
    return state.settings.family.reads_mscale_all_dim or not state.settings.family.known


def _softmax_scale(state: CheckpointState) -> Iterator[Finding]:
    for label, parameters in rope_fields(state):
        if not parameters.get("mscale_all_dim") or not _scales_softmax(state):
            continue
        if rope_type_of(parameters) not in ("yarn", "default"):
            message = (
                f"mscale_all_dim in {label} is left over from yarn, and still multiplies the softmax scale of "
                f"DeepSeek's models under rope_type {rope_type_of(parameters)!r}."
            )
            yield Finding("mscale-left-over", message, fix_command(state))
        elif parameters.get("attention_factor") is not None:
            message = f"attention_factor and mscale_all_dim in {label} both set the temperature: it counts twice."
            yield Finding("attention-factor-twice", message, fix_command(state))


def _dynamic_switched_off(state: CheckpointState) -> Iterator[Finding]:
    smaller = unread_lengths(state)
    if state.main.spec.method.name == "dynamic" and smaller:
        yield Finding(
            "dynamic-switched-off",
            f"dynamic takes max_position_embeddings, {state.max_position_embeddings}, for its pretraining length and "
            f"scales nothing up to there; {ORIGINAL_LENGTH} {smaller[0]} is not read.",
            fix_command(state),
        )


def _switching(state: CheckpointState) -> Iterator[Finding]:
    rope = state.main
    if varies_with_length(rope):
        yield Finding(
            "switches-with-length",
            f"{rope.spec.method} here has other frequencies for long inputs than for short ones: rows of a batch, "
            "chunks of a prompt, and a KV cache that grows past the pretraining length do not fit together.",
        )


def _lengths(state: CheckpointState) -> Iterator[Finding]:
    spec, written = state.main.spec, state.max_position_embeddings
    scaling = (
        f"{spec.method} ×{spec.factor:g} of a pretraining length of {state.pretraining_length} reaches "
        f"{state.main.scaled_length}"
    )
    if falls_short(state):
        yield Finding(
            "window-beyond-scaling",
            f"max_position_embeddings is {written}, and {scaling}. The fix scales by more; a model that was trained as "
            "it is wants max_position_embeddings lowered instead.",
            fix_command(state),
        )
    if stops_early(state):
        message = f"max_position_embeddings is {written}, and {scaling}: serving stacks stop at the smaller."
        yield Finding("window-below-scaling", message, fix_command(state))


def _tokenizer(state: CheckpointState) -> Iterator[Finding]:
    longest = (state.checkpoint.tokenizer_config or {}).get("model_max_length")
    length = state.context_length
    if isinstance(longest, int | float) and not isinstance(longest, bool) and longest < length:
        message = (
            f"the tokenizer's model_max_length is {longest:g} tokens, below the context length of {length}: it cuts or "
        )
        yield Finding("tokenizer-caps", f"{message}warns there.", fix_command(state))


def _sliding(state: CheckpointState) -> Iterator[Finding]:
    section, family = state.section, state.settings.family
    sliding = moot_sliding_window(section, family)
    if sliding is not None and sliding < state.max_position_embeddings:
        message = f"sliding_window is {sliding}: no layer attends further back, so that extending the context is moot."
        yield Finding("sliding-window", message)
    if family.only_sliding_turn and mixes_layers(section, family):
        message = (
            f"in {family.model_type} only the sliding layers turn; those that see the whole context have no positions, "
            "so that there is nothing to scale: patch --method none --target-length N raises the context length alone."
        )
        yield Finding("far-layers-do-not-turn", message)


def _short(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value)


_RULES = (
    _unclear,
    _only_new_dialect,
    _stale_rope_scaling,
    _outside_of_text_config,
    _stray_original_length,
    _null_head_dim,
    _old_names,
    _unread_keys,
    _softmax_scale,
    _dynamic_switched_off,
    _switching,
    _lengths,
    _tokenizer,
    _sliding,
)
