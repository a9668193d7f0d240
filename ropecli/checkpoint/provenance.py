"""ropecli.yaml, the note beside the weights: what was done to what. Owns the way back to the original config."""

from typing import Any, NamedTuple

import yaml

from ropecli.checkpoint.reading import Checkpoint, copy_config
from ropecli.errors import CheckpointError
from ropecli.rope import ScalingSpec

PROVENANCE = "ropecli.yaml"
_ABSENT = "<absent>"


class Change(NamedTuple):
    """One value of config.json before and after; `_ABSENT` stands for a key that is not there."""

    path: str
    before: Any
    after: Any


class Provenance(NamedTuple):
    """original: config.json as it was before any patch. spec: the scaling in effect. history: earlier commands."""

    original: dict[str, Any]
    spec: ScalingSpec
    record: dict[str, Any]


def read_provenance(checkpoint: Checkpoint) -> Provenance | None:
    """None where there is no ropecli.yaml, or where config.json was edited since it was written.

    Raises CheckpointError for a ropecli.yaml that cannot be read.
    """
    path = checkpoint.folder / PROVENANCE
    if not path.is_file():
        return None
    try:
        record = yaml.safe_load(path.read_text(encoding="utf-8"))
        changes = [Change(**change) for change in record["changes"]]
        scaling = record["scaling"]
        spec = ScalingSpec(scaling["method"], float(scaling["factor"]), dict(scaling["params"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Remove it to go by config.json alone.") from error
    original = copy_config(checkpoint.config)
    for change in changes:
        if get_path(original, change.path) != change.after:
            return None
        set_path(original, change.path, change.before)
    return Provenance(original, spec, record)


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
        config = config.get(key) or {}
    return config.get(last, _ABSENT)


def set_path(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    if value == _ABSENT:
        config.pop(last, None)
    else:
        config[last] = value
