"""Compares two configs value by value, and undoes changes."""

import copy
from typing import Any, NamedTuple

ABSENT = "<absent>"


class ConfigChange(NamedTuple):
    """One value of config.json before and after; `ABSENT` for a missing key."""

    path: str
    before: Any
    after: Any


def diff(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[ConfigChange]:
    """The changes between two configs. Objects are compared key by key; paths join keys with dots."""
    changes = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if isinstance(old, dict) and isinstance(new, dict):
            changes += diff(old, new, f"{prefix}{key}.")
        elif old != new or type(old) is not type(new):
            changes.append(ConfigChange(f"{prefix}{key}", old, new))
    return changes


def undo(config: dict[str, Any], changes: list[ConfigChange]) -> dict[str, Any]:
    """`config` before `changes`. The order of its keys may differ."""
    config = copy.deepcopy(config)
    for change in changes:
        set_path(config, change.path, change.before)
    return config


def get_path(config: dict[str, Any], path: str) -> Any:
    *parents, last = path.split(".")
    for key in parents:
        config = (config.get(key) or {}) if isinstance(config, dict) else {}
    return config.get(last, ABSENT) if isinstance(config, dict) else ABSENT


def set_path(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    if value == ABSENT:
        config.pop(last, None)
    else:
        config[last] = value
