"""The `ropecli patch` command that fixes what lint.py finds, ready to paste."""

import shlex
from typing import Any

from ropecli.checkpoint.files import CONFIG
from ropecli.checkpoint.state import CheckpointState
from ropecli.config.dialects import ORIGINAL_LENGTH, Parameters, rope_type_of
from ropecli.errors import shown
from ropecli.scaling.spec import ScalingSpec

_FROM_PRETRAINING_LENGTH = ("yarn", "llama3", "longrope")
# Their factor is a ratio of lengths; llama3's is not.
_BY_RATIO = ("linear", "ntk-by-parts", "yarn")


def rope_fields(state: CheckpointState) -> list[tuple[str, Parameters]]:
    """Every set of RoPE parameters in config.json with the place where it stands."""
    section = state.section
    found: list[tuple[str, Parameters]] = []
    for key in ("rope_parameters", "rope_scaling"):
        value = section.get(key)
        if isinstance(value, dict):
            nested = [(f"{key}.{key_shown(label)}", one) for label, one in value.items() if isinstance(one, dict)]
            found += nested or [(key, value)]
    return found


def falls_short(state: CheckpointState) -> bool:
    """Whether max_position_embeddings promises more than the scaling reaches."""
    longer = state.max_position_embeddings > state.main.scaled_length
    return state.main.spec.method.name in _BY_RATIO and longer and not state.guesses_pretraining_length


def stops_early(state: CheckpointState) -> bool:
    """Whether max_position_embeddings ends before the scaling does."""
    shorter = state.max_position_embeddings < state.main.scaled_length
    return state.main.spec.method.name in (*_BY_RATIO, "longrope") and shorter and not state.guesses_pretraining_length


def overruled_lengths(state: CheckpointState) -> list[tuple[str, Any]]:
    """Where a pretraining length is named that the one at the top overrules."""
    stray = state.section.get(ORIGINAL_LENGTH)
    if stray is None:
        return []
    found = [
        (label, one.get(ORIGINAL_LENGTH))
        for label, one in rope_fields(state)
        # by layer type, the one at the top is not read
        if "." not in label and rope_type_of(one) in _FROM_PRETRAINING_LENGTH
    ]
    return [(label, inside) for label, inside in found if inside is not None and inside != stray]


def unread_lengths(state: CheckpointState) -> list[int]:
    """Pretraining lengths that are named for dynamic, smaller than the one that is taken."""
    section, most = state.section, state.max_position_embeddings
    lengths = [section.get(ORIGINAL_LENGTH), *(one.get(ORIGINAL_LENGTH) for _, one in rope_fields(state))]
    return [one for one in lengths if isinstance(one, int) and not isinstance(one, bool) and 0 < one < most]


def fix_command(state: CheckpointState) -> str | None:
    """The patch that writes the same scaling again: one command that fixes all that a patch can fix.

    None for a distance method without ropecli.yaml: such a checkpoint is not patched again.
    """
    main, note = state.main, state.note
    if main.remapping is not None and note is None:
        return None
    spec, options = main.spec, _lengths(state)
    if note and note.layer_types and main.geometry.layer_type not in note.layer_types:
        spec = note.spec()
        options["layer_types"] = ",".join(map(str, note.layer_types))
    return _patch_command(state, spec, by_length=falls_short(state), **options)


def _lengths(state: CheckpointState) -> dict[str, object]:
    """The options by which the patch starts from the true pretraining length, and keeps the context length."""
    if state.guesses_pretraining_length:
        return {"original_length": "N"}
    if state.main.spec.method.name == "dynamic":
        unread = unread_lengths(state)
        return {"original_length": unread[0]} if unread else {}
    lengths: dict[str, object] = {}
    if overruled_lengths(state):
        lengths["original_length"] = state.pretraining_length
    written = state.max_position_embeddings
    if written != state.main.scaled_length and written >= state.pretraining_length and not stops_early(state):
        lengths["target_length"] = written
    return lengths


def _patch_command(state: CheckpointState, spec: ScalingSpec, *, by_length: bool, **options: object) -> str:
    """DIR stands for the folder to write, N for a number to find. by_length: the factor follows from target_length."""
    checkpoint = state.checkpoint
    words = ["ropecli", "patch", checkpoint.name]
    if checkpoint.revision is not None:
        words += ["--revision", checkpoint.revision]
    # what custom gives is written as longrope, and read back from there
    words += ["--method", "longrope" if spec.method.name == "custom" else spec.method.name]
    if spec.method.name != "none" and not by_length:
        words += ["--factor", _exact(spec.factor)]
    if any(isinstance(value, list) for value in spec.params.values()):
        words += ["--factors-file", str(checkpoint.folder / CONFIG)]
    else:
        words += _settings(spec)
    for key, value in options.items():
        words += [f"--{key.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--output", "DIR"])


def _settings(spec: ScalingSpec) -> list[str]:
    """--set for what differs from the method's defaults."""
    words, known = [], spec.method.signature
    for key, value in spec.params.items():
        if value is not None and value != known[key].default:
            words += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
    return words


def _exact(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def key_shown(key: str) -> str:
    """A key as a message shows it, whoever wrote it."""
    return key if key.isidentifier() and len(key) <= 60 else shown(key)
