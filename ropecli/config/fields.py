"""Reads values of config.json and checks their type and range. Invalid values raise CheckpointError."""

from typing import Any

from ropecli.config.families import Family
from ropecli.errors import CheckpointError, shown

_WIDEST_HEAD = 2**16
LATENT = "qk_rope_head_dim"
_LARGEST = 1e15
"""Far above any real count, base or factor; float64 cannot represent all larger integers."""


def section_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part with the RoPE fields: the whole config or, for composite models, `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def first(section: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first of `keys` that is present and not null; otherwise None."""
    return next((section[key] for key in keys if section.get(key) is not None), None)


def mapping(section: dict[str, Any], key: str) -> dict[str, Any]:
    value = section.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} in config.json is {shown(value)}; expected an object.")
    return value


def whole_number(section: dict[str, Any], keys: tuple[str, ...]) -> int:
    key = next((key for key in keys if section.get(key) is not None), " or ".join(keys))
    value = section.get(key)
    number = int(positive_number(key, value))
    if number != value:
        raise CheckpointError(f"{key} in config.json is {value}; expected a positive integer.")
    return number


def positive_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise CheckpointError(f"{key} in config.json is {shown(value)}; expected a positive number below {_LARGEST:g}.")
    return value


def head_dim(section: dict[str, Any], family: Family, layer_type: str | None = None) -> int:
    """Width of a head: MLA's rotary part, head_dim (possibly of the layer type), or hidden_size / attention heads."""
    names = family.names_of("head_dim")
    if section.get(LATENT) is not None and LATENT not in names:
        return whole_number(section, (LATENT,))
    by_type = family.layers.get(layer_type or "", {}).get("head_dim")
    if by_type is not None and section.get("per_layer_config") is None:  # Gemma 4, as shipped
        key = "global_head_dim" if family.sees_whole_context(layer_type) else "head_dim"
        return whole_number({key: section.get(key, by_type)}, (key,))
    own = of_layer(section, layer_type)
    if first(own, names) is not None:
        return whole_number(own, names)
    if family.head_dim is not None and "head_dim" not in section:
        return family.head_dim
    return number_of(section, family, "hidden_size") // number_of(section, family, "num_attention_heads")


def number_of(section: dict[str, Any], family: Family, key: str) -> int:
    """The number under `key`, or the model type's default: parts of multimodal models often name only what differs."""
    names, default = family.names_of(key), getattr(family, key)
    return (
        default if default is not None and not any(name in section for name in names) else whole_number(section, names)
    )


def rotary_dim(section: dict[str, Any], head: int, share: Any) -> int:
    """Width of the rotary part of a head: `share` of the head, or all of it."""
    if section.get(LATENT) is not None:
        share = 1.0  # `head` is the rotary part already; a share in config.json refers to the whole head
    width = int(head * positive_number("partial_rotary_factor", 1.0 if share is None else share))
    if not 2 <= width <= min(head, _WIDEST_HEAD) or width % 2:
        raise CheckpointError(
            f"The rotary part of a head is {width} wide; expected an even number from 2 to {min(head, _WIDEST_HEAD)}. "
            "Check head_dim and partial_rotary_factor in config.json."
        )
    return width


def of_layer(section: dict[str, Any], layer_type: str | None) -> dict[str, Any]:
    """`section` for the layers of one type, with their overrides, which per_layer_config has by layer index."""
    labels, differing = section.get("layer_types"), section.get("per_layer_config")
    if layer_type is None or not isinstance(labels, list) or not isinstance(differing, dict):
        return section
    by_index = {key.lstrip("0") or "0": fields for key, fields in differing.items()}  # saved indices are zero-padded
    for index, label in enumerate(labels):
        if label == layer_type and isinstance(fields := by_index.get(str(index)), dict):
            return {**section, **fields}
    return section
