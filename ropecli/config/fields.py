"""Values of config.json, read with their kind and range checked. What is off raises CheckpointError, never more."""

from typing import Any

from ropecli.config.families import Family
from ropecli.errors import CheckpointError, shown

_WIDEST_HEAD = 2**16
_LATENT = "qk_rope_head_dim"
_LARGEST = 1e15
"""No count, base or factor of a model comes near it; beyond, float64 loses whole numbers."""


def section_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part that holds the RoPE fields: all of it or, in composite models, `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def first(section: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The first of `keys` that is there and not null; None where there is none."""
    return next((section[key] for key in keys if section.get(key) is not None), None)


def mapping(section: dict[str, Any], key: str) -> dict[str, Any]:
    value = section.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} in config.json is {shown(value)}; an object was expected.")
    return value


def whole_number(section: dict[str, Any], keys: tuple[str, ...]) -> int:
    key = next((key for key in keys if section.get(key) is not None), None)
    if key is None:
        raise CheckpointError(f"config.json has no {' or '.join(keys)}.")
    value = section[key]
    number = int(positive_number(key, value))
    if number != value:
        raise CheckpointError(f"{key} in config.json is {value}; a whole number from 1 on was expected.")
    return number


def positive_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise CheckpointError(
            f"{key} in config.json is {shown(value)}; a positive number below {_LARGEST:g} was expected."
        )
    return value


def head_dim(section: dict[str, Any], family: Family, layer_type: str | None = None) -> int:
    """Width of what turns in a head: MLA's rope part, or head_dim (a layer type may have its own), or width / heads."""
    names = family.names_of("head_dim")
    if section.get(_LATENT) is not None and _LATENT not in names:
        return whole_number(section, (_LATENT,))
    by_type = family.layers.get(layer_type or "", {}).get("head_dim")
    if by_type is not None and section.get("per_layer_config") is None:  # Gemma 4, as published
        key = "global_head_dim" if family.sees_whole_context(layer_type) else "head_dim"
        return whole_number({key: section.get(key, by_type)}, (key,))
    own = _of_layer(section, layer_type)
    if first(own, names) is not None:
        return whole_number(own, names)
    if family.head_dim is not None and "head_dim" not in section:
        return family.head_dim
    width = whole_number(section, family.names_of("hidden_size"))
    return width // whole_number(section, family.names_of("num_attention_heads"))


def rotary_dim(section: dict[str, Any], head: int, share: Any) -> int:
    """Width of the part of a head that turns; `share` of the head, or all of it."""
    if section.get(_LATENT) is not None:
        share = 1.0  # the part that turns is named by its width; a share beside it says the same of the whole head
    width = int(head * positive_number("partial_rotary_factor", 1.0 if share is None else share))
    if not 2 <= width <= min(head, _WIDEST_HEAD) or width % 2:
        raise CheckpointError(
            f"The rotary part of a head would be {width} wide; an even number from 2 on was expected, "
            f"at most the head's own width, {head}, and {_WIDEST_HEAD}."
        )
    return width


def _of_layer(section: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """`section` as the layers of one type see it: transformers keeps what differs in per_layer_config, by index."""
    labels, differing = section.get("layer_types"), section.get("per_layer_config")
    if layer_type is None or not isinstance(labels, list) or not isinstance(differing, dict):
        return section
    by_index = {key.lstrip("0") or "0": own for key, own in differing.items()}  # saved ones are as long as the longest
    for index, label in enumerate(labels):
        if label == layer_type and isinstance(own := by_index.get(str(index)), dict):
            return {**section, **own}
    return section
