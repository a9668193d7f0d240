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
    """`config` before `changes`; the order of its keys may differ."""
    config = copy.deepcopy(config)
    for change in changes:
        set_path(config, change.path, change.before)
    return config


def key_orders(original: dict[str, Any], restored: dict[str, Any], prefix: str = "") -> dict[str, list[str]]:
    """The keys of every object of `original` whose order differs in `restored`, by path."""
    orders = {} if list(original) == list(restored) else {prefix[:-1]: list(original)}
    for key, value in original.items():
        if isinstance(value, dict):
            orders |= key_orders(value, restored[key], f"{prefix}{key}.")
    return orders


def put_in_order(config: dict[str, Any], orders: dict[str, list[str]]) -> dict[str, Any]:
    for path, keys in orders.items():
        place = get_path(config, path) if path else config
        ordered = {key: place[key] for key in [*keys, *place] if key in place}
        place.clear()
        place.update(ordered)
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
