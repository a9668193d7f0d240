"""ropecli.yaml, the note beside the weights: what was done to what. Owns the way back to the original config."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ropecli.checkpoint.reading import Checkpoint
from ropecli.errors import CheckpointError, reason_of
from ropecli.rope import ScalingSpec

PROVENANCE = "ropecli.yaml"
_ABSENT = "<absent>"


class Change(NamedTuple):
    """One value of config.json before and after; `_ABSENT` stands for a key that is not there."""

    path: str
    before: Any
    after: Any


class Provenance(NamedTuple):
    """What ropecli.yaml says.

    original: config.json as it was before any patch. spec: the scaling in effect. original_length: the
    pretraining window, tokens. target_length: the window patched for. edited: keys of config.json that were
    changed since; where there are any, the note no longer tells what is in effect.
    """

    original: dict[str, Any]
    spec: ScalingSpec
    original_length: int
    target_length: int
    edited: tuple[str, ...]


def read_provenance(checkpoint: Checkpoint) -> Provenance | None:
    """None where there is no ropecli.yaml, or none of a patch. Its edited: what was changed in config.json since.

    Raises CheckpointError for a ropecli.yaml that cannot be read.
    """
    record = read_record(checkpoint.folder)
    if "changes" not in record:  # written beside a checkpoint that was trained, and never patched
        return None
    try:
        changes = [Change(str(change["path"]), change["before"], change["after"]) for change in record["changes"]]
        scaling = record["scaling"]
        params = {str(key): value for key, value in scaling["params"].items()}
        spec = ScalingSpec(str(scaling["method"]), float(scaling["factor"]), params)
        lengths = int(record["original_max_position_embeddings"]), int(record["target_length"])
        edited = [change.path for change in changes if get_path(checkpoint.config, change.path) != change.after]
        original = copy.deepcopy(checkpoint.config)
        for change in changes:
            if not edited:
                set_path(original, change.path, change.before)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise unreadable(checkpoint.folder, error) from error
    return Provenance(original, spec, *lengths, tuple(edited))


def read_record(folder: Path) -> dict[str, Any]:
    """ropecli.yaml as it stands; empty where there is none. Raises CheckpointError."""
    path = folder / PROVENANCE
    if not path.is_file():
        return {}
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise unreadable(folder, error) from error
    if not isinstance(record, dict):
        raise unreadable(folder, TypeError("it holds no mapping"))
    return record


def unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{folder / PROVENANCE} cannot be read ({reason_of(error)}). Remove it to go by config.json alone."
    )


def diff(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[Change]:
    """The changes between two configs, objects compared key by key. Keys are joined by dots."""
    changes = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += diff(old, new, f"{prefix}{key}.")
        elif old != new or type(old) is not type(new):
            changes.append(Change(f"{prefix}{key}", old, new))
    return changes


def get_path(config: dict[str, Any], path: str) -> Any:
    *parents, last = path.split(".")
    for key in parents:
        config = (config.get(key) or {}) if isinstance(config, dict) else {}
    return config.get(last, _ABSENT) if isinstance(config, dict) else _ABSENT


def set_path(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    if value == _ABSENT:
        config.pop(last, None)
    else:
        config[last] = value
