"""The `ropecli patch` command that fixes the findings of lint.py."""

from typing import Any

from ropecli.checkpoint.files import CONFIG
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.checkpoint.provenance import patch_command
from ropecli.checkpoint.state import CheckpointState
from ropecli.config.dialects import ORIGINAL_LENGTH, Parameters, rope_type_of
from ropecli.config.families import is_known
from ropecli.errors import RopecliError, shown

_FROM_PRETRAINING_LENGTH = ("yarn", "llama3", "longrope")
# Methods with factor = target length / pretraining length; llama3's factor is not a ratio of lengths.
_BY_RATIO = ("linear", "ntk-by-parts", "yarn")


def rope_fields(state: CheckpointState) -> list[tuple[str, Parameters]]:
    """All sets of RoPE parameters in config.json, each with its key path."""
    fields: list[tuple[str, Parameters]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = state.section.get(key)
        if isinstance(value, dict):
            nested = [(f"{key}.{key_shown(label)}", inner) for label, inner in value.items() if isinstance(inner, dict)]
            fields += nested or [(key, value)]
    return fields


def falls_short(state: CheckpointState) -> bool:
    """Return whether max_position_embeddings is longer than the scaling reaches."""
    longer = state.max_position_embeddings > state.main.scaled_length
    return state.main.spec.method.name in _BY_RATIO and longer and not state.guesses_pretraining_length


def stops_early(state: CheckpointState) -> bool:
    """Return whether max_position_embeddings is shorter than the scaling reaches."""
    shorter = state.max_position_embeddings < state.context_length
    return state.main.spec.method.name in (*_BY_RATIO, "longrope") and shorter and not state.guesses_pretraining_length


def overruled_lengths(state: CheckpointState) -> list[tuple[str, Any]]:
    """Key path and value of each pretraining length that the top-level one overrides."""
    stray = state.section.get(ORIGINAL_LENGTH)
    return [
        (label, parameters[ORIGINAL_LENGTH])
        for label, parameters in rope_fields(state)
        # for parameters by layer type, the top-level one is not read
        if "." not in label and rope_type_of(parameters) in _FROM_PRETRAINING_LENGTH
        if stray is not None and parameters.get(ORIGINAL_LENGTH) not in (None, stray)
    ]


def unread_lengths(state: CheckpointState) -> list[int]:
    """Pretraining lengths in config.json below max_position_embeddings; dynamic NTK ignores them."""
    lengths = [fields.get(ORIGINAL_LENGTH) for fields in (state.section, *(fields for _, fields in rope_fields(state)))]
    limit = state.max_position_embeddings
    return [length for length in lengths if type(length) is int and 0 < length < limit]


def fix_command(state: CheckpointState) -> str | None:
    """The patch command that writes the same scaling again, which fixes everything that a patch can fix.

    None if `patch` would refuse it, for example a distance method without ropecli.yaml.
    """
    main, note = state.main, state.note
    if main.remapping is not None and note is None:
        return None
    spec, options = main.spec, _lengths(state)
    if note and main.geometry.layer_type not in note.layer_types:
        spec = note.spec()
        options["layer_types"] = ",".join(map(str, note.layer_types))
    lengths = {key: value for key, value in options.items() if isinstance(value, int)}
    labels = options["layer_types"].split(",") if "layer_types" in options else None
    try:
        plan = make_plan(state.checkpoint, spec, layer_types=labels, choose_factor=falls_short(state), **lengths)
    except RopecliError:
        return None
    if plan.unwritable:
        return None
    checkpoint, by_length = state.checkpoint, falls_short(state) or spec.method.name == "none"
    return patch_command(
        checkpoint.name,
        checkpoint.revision,
        spec.method.name,
        None if by_length else spec.factor,
        spec.params,
        factors_file=checkpoint.folder / CONFIG,
        options=options if is_known(checkpoint.config) else {**options, "no_verify": None},
    )


def _lengths(state: CheckpointState) -> dict[str, Any]:
    """Options that set the true pretraining length and keep the context length."""
    if state.guesses_pretraining_length:
        return {"original_length": "N"}
    if state.main.spec.method.name == "dynamic":
        unread = unread_lengths(state)
        return {"original_length": unread[0]} if unread else {}
    lengths = {}
    if overruled_lengths(state):
        lengths["original_length"] = state.pretraining_length
    written = state.max_position_embeddings
    if written != state.main.scaled_length and written >= state.pretraining_length and not stops_early(state):
        lengths["target_length"] = written
    return lengths


def key_shown(key: str) -> str:
    """A config key, quoted and shortened for a message unless it is a short identifier."""
    return key if key.isidentifier() and len(key) <= 60 else shown(key)
