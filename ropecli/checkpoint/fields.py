"""Values of config.json, read with their kind and range checked. What is off raises CheckpointError, never more."""

from typing import Any

from ropecli.errors import CheckpointError, shown

_WIDEST_HEAD = 2**16
_LARGEST = 1e15
"""No count, base or factor of a model comes near it; beyond, float64 loses whole numbers."""


def first(section: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The first of `keys` that is there and not null; None where there is none."""
    return next((section[key] for key in keys if section.get(key) is not None), None)


def mapping(section: dict[str, Any], key: str) -> dict[str, Any]:
    value = section.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} in config.json is {shown(value)}; an object was expected.")
    return value


def whole_number(section: dict[str, Any], keys: tuple[str, ...]) -> int:
    value = first(section, keys)
    if value is None:
        raise CheckpointError(f"config.json has none of {', '.join(keys)}.")
    number = int(positive_number(keys[0], value))
    if number != value:
        raise CheckpointError(f"{keys[0]} in config.json is {value}; a whole number from 1 on was expected.")
    return number


def positive_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise CheckpointError(f"{key} in config.json is {shown(value)}; a positive number was expected.")
    return value


def head_dim(section: dict[str, Any]) -> int:
    """Width of what turns in a head: MLA's rope part, or head_dim, or hidden_size / heads."""
    for key in ("qk_rope_head_dim", "head_dim"):
        if section.get(key) is not None:
            return whole_number(section, (key,))
    width = whole_number(section, ("hidden_size", "n_embd", "d_model"))
    return width // whole_number(section, ("num_attention_heads", "n_head", "n_heads"))


def rotary_dim(section: dict[str, Any], share: Any) -> int:
    """Width of the part of a head that turns; `share` of the head, or all of it."""
    head = head_dim(section)
    width = int(head * positive_number("partial_rotary_factor", 1.0 if share is None else share))
    if not 2 <= width <= min(head, _WIDEST_HEAD) or width % 2:
        raise CheckpointError(
            f"The rotary part of a head would be {width} wide; an even number from 2 on was expected, "
            f"at most the head's own width, {head}, and {_WIDEST_HEAD}."
        )
    return width
