"""Finds settings in a checkpoint's files that stock readers silently ignore or misread. Each finding can have a fix.

Rules only read config.json and the names of files, and report only what is certain.
"""

import difflib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropecli.checkpoint import plan_warnings
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
    shown_key,
)
from ropecli.config.families import ignores_top_level, is_known
from ropecli.config.fields import first
from ropecli.config.findings import DEFAULT_BASE, TEXT_TRUNCATE, Finding
from ropecli.errors import RopecliError, quoted, shown

_READ = {"rope_type", "type", "rope_theta", "mixed_b", ORIGINAL_LENGTH, "finetuned", *KEPT_KEYS}
# finetuned: a note of YaRN's; mixed_b: of `ntk`
_USUAL_BASE = 10000.0
# Methods with factor = target length / pretraining length; llama3's factor is not a ratio of lengths.
_BY_RATIO = ("linear", "ntk-by-parts", "yarn")


def find_faults(state: CheckpointState) -> list[Finding]:
    """All findings about the files."""
    rules = (_against_makers, _only_new_dialect, _outside_of_text_config, _unread_keys, _lengths, _other_formats)
    found = [*state.findings, *(finding for rule in rules for finding in rule(state))]
    # a patch would write the default base, and hide that it is one
    hides_base = any(finding.rule == DEFAULT_BASE for finding in found)
    is_fixed = any(finding.record.is_fixed for finding in found) and not hides_base
    fix = fix_command(state) if is_fixed else None
    return [finding._replace(fix=fix) if finding.record.is_fixed else finding for finding in found]


def faults_in_results(state: CheckpointState) -> tuple[Finding, ...]:
    """The findings that change what is computed."""
    return tuple(finding for finding in find_faults(state) if finding.record.changes_results)


def _against_makers(state: CheckpointState) -> Iterator[Finding]:
    """A scaling, or a length without one, that the makers' training does not explain."""
    spec, before = state.positions.main.spec, state.before
    theirs, makers = before.overruled_by, before.makers
    if theirs and theirs.pretraining_length > before.config_length:
        what = f"{spec.method} ×{spec.factor:g} of {before.config_length} tokens is not the makers' scaling"
        trained = f"they trained on {theirs.pretraining_length} tokens ({theirs.source}), and it makes the model worse"
        yield Finding("foreign-scaling", f"{what}: {trained}.")
    elif theirs:
        length, extension = theirs.pretraining_length, theirs.extension
        scaling = f", and their scaling is {extension[0]} ×{extension[1]:g} of that" if extension else ""
        what = f"the makers' pretraining length is {length} tokens ({theirs.source})"
        yield Finding("foreign-length", f"{what}, not {before.config_length}{scaling}.")
    elif makers and makers.longest and state.settings.max_position_embeddings > makers.longest:
        what = f"max_position_embeddings is {state.settings.max_position_embeddings} without a scaling; the makers"
        trained = f"trained on {makers.pretraining_length} tokens ({makers.source}), and ship {makers.longest}"
        yield Finding("beyond-makers", f"{what} {trained}.")


def _makers_fix(state: CheckpointState) -> str | None:
    """The patch command that restores what the makers ship; None where nothing speaks against config.json."""
    before, checkpoint = state.before, state.checkpoint
    makers = before.known_makers
    if makers is None or not any(_against_makers(state)):
        return None
    options = {"original_length": makers.pretraining_length} if before.overruled_by else {}
    trained_longer = before.overruled_by and makers.pretraining_length > before.config_length
    method, factor = makers.extension[:2] if makers.extension and not trained_longer else ("unscaled", None)
    return patch_command(checkpoint.name, checkpoint.revision, method, factor, options=options)


def _only_new_dialect(state: CheckpointState) -> Iterator[Finding]:
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
        message = f"transformers 4 ignores {' and '.join(lost)}, which only rope_parameters has. Write both dialects."
        yield Finding("one-dialect", message)


def _outside_of_text_config(state: CheckpointState) -> Iterator[Finding]:
    config, section = state.checkpoint.config, state.section
    if ignores_top_level(config):
        message = (
            "config.json has no text_config: transformers ignores the fields of the language model and uses the "
            f"defaults of {config['model_type']}. Use a conversion of the model to transformers' format."
        )
        yield Finding("no-text-config", message)
    if section is config:
        return
    names = ("rope_parameters", "rope_scaling", *THETA_KEYS)
    stray = [name for name in names if config.get(name) is not None and config[name] != section.get(name)]
    if stray:
        message = (
            f"{', '.join(stray)} outside of text_config: the text model only reads text_config. Move the correct "
            "values there, and remove the others."
        )
        yield Finding("outside-text-config", message)


def _unread_keys(state: CheckpointState) -> Iterator[Finding]:
    family = state.settings.family
    for label, parameters in _rope_fields(state):
        rope_type = rope_type_of(parameters)
        read = {*NATIVE_KEYS.get(rope_type, ()), *_READ, *(["alpha"] if has_alpha(parameters, family) else [])}
        if "." in label:
            read.discard("truncate")  # transformers 5 reads it next to the layer types
        if family.reads_mscale_all_dim or not family.known:
            read.add("mscale_all_dim")  # it may multiply the softmax scale, whatever the rope_type
        for key, value in parameters.items():
            if key in read or isinstance(value, dict | None):
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
            message = f"{shown_key(key)} in {label} is ignored for rope_type {rope_type!r}.{hint}"
            yield Finding("unread-key", message)


def _lengths(state: CheckpointState) -> Iterator[Finding]:
    main, written = state.positions.main, state.settings.max_position_embeddings
    yield from plan_warnings.switches(main)
    if _falls_short(state) and not state.before.overruled_by:
        for finding in plan_warnings.beyond_scaling(main, written):
            advice = "The fix raises the factor; if the model was trained with this one, lower max_position_embeddings."
            yield finding._replace(message=f"{finding.message} {advice}")
    if _stops_early(state):
        message = (
            f"max_position_embeddings is {written}, but {main.spec.method} ×{main.spec.factor:g} "
            f"reaches {main.scaled_length} tokens. Inference engines stop at the smaller."
        )
        yield Finding("context-below-scaling", message)
    longest = (state.checkpoint.tokenizer_config or {}).get("model_max_length")
    context = state.positions.context_length
    if isinstance(longest, int | float) and not isinstance(longest, bool) and longest < context:
        message = (
            f"the tokenizer's model_max_length is {longest:g} tokens, below the context length of {context}: longer "
            "inputs are truncated or cause a warning."
        )
        yield Finding("tokenizer-caps", message)


def _other_formats(state: CheckpointState) -> Iterator[Finding]:
    folder = state.checkpoint.folder
    if any(Path(name).match(WEIGHTS) for name in state.checkpoint.skipped_files()):
        yield Finding("mistral-format", state.checkpoint.skip_warning)
    if is_own_file(folder / ADAPTER_CONFIG):
        message = (
            f"{ADAPTER_CONFIG} is beside a whole model: transformers adds the adapter to the model or, from the Hub, "
            "loads the base model that it names. Other engines ignore it. Move it to another folder."
        )
        yield Finding("adapter-beside-model", message)


def _rope_fields(state: CheckpointState) -> list[tuple[str, Parameters]]:
    """All sets of RoPE parameters in config.json, each with its key path."""
    fields: list[tuple[str, Parameters]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = state.section.get(key)
        if isinstance(value, dict):
            nested = [(f"{key}.{shown_key(label)}", inner) for label, inner in value.items() if isinstance(inner, dict)]
            fields += nested or [(key, value)]
    return fields


def _falls_short(state: CheckpointState) -> bool:
    """Return whether max_position_embeddings is longer than the scaling reaches."""
    main = state.positions.main
    longer = state.settings.max_position_embeddings > main.scaled_length
    return main.spec.method.name in _BY_RATIO and longer and not state.before.guesses_pretraining_length


def _stops_early(state: CheckpointState) -> bool:
    """Return whether max_position_embeddings is shorter than the scaling reaches."""
    method = state.positions.main.spec.method.name
    shorter = state.settings.max_position_embeddings < state.positions.context_length
    return method in (*_BY_RATIO, "longrope") and shorter and not state.before.guesses_pretraining_length


def fix_command(state: CheckpointState) -> str | None:
    """The patch command that writes the same scaling again, which fixes everything that a patch can fix.

    None if `patch` would refuse it, for example a distance method without ropecli.yaml.
    """
    main, note, checkpoint = state.positions.main, state.note, state.checkpoint
    if main.remapping is not None and note is None:
        return None
    if command := _makers_fix(state):
        return command
    spec, options, labels = main.spec, _fixing_lengths(state), None
    if any(finding.rule == TEXT_TRUNCATE for finding in state.before.findings):
        spec = replace(spec, params={**spec.params, "truncate": False})
    lengths: dict[str, Any] = {key: value for key, value in options.items() if isinstance(value, int)}
    if note and main.geometry.layer_type not in note.layer_types:
        spec, labels = note.spec(), list(map(str, note.layer_types))
        options["layer_types"] = ",".join(labels)
    try:
        make_plan(state.checkpoint, spec, layer_types=labels, choose_factor=_falls_short(state), **lengths)
    except RopecliError:
        return None
    by_length = _falls_short(state) or spec.method.name == "none"
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
    if state.before.guesses_pretraining_length:
        return {"original_length": state.before.unscaled.pretraining_length if state.before.unscaled else "N"}
    main, written = state.positions.main, state.settings.max_position_embeddings
    if main.spec.method.name == "dynamic" or written == main.scaled_length or _stops_early(state):
        return {}
    return {"target_length": written} if written >= state.positions.pretraining_length else {}
