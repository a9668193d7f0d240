"""The fields of config.json that ropecli reads: one table of their kinds, checked once, and what they say."""

from collections.abc import Callable, Iterable
from typing import Any

from ropecli.config.families import Family
from ropecli.errors import CheckpointError, shown

_WIDEST_HEAD = 2**16
LATENT = "qk_rope_head_dim"
_DRAFT_LAYERS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers")
_DRAFTERS = ("Eagle", "Draft", "Speculator", "DFlash", "DSpark", "MTP", "Medusa")


def _integer(low: int, high: int = 10**10) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _or(*kinds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(fits(value) for fits in kinds)


# fmt: off
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "a positive integer below 1e+10": (_integer(1),
        "max_position_embeddings n_positions max_sequence_length max_seq_len seq_length "
        "original_max_position_embeddings vocab_size hidden_size n_embd d_model head_dim attention_head_dim "
        "global_head_dim swa_head_dim v_head_dim swa_v_head_dim rotary_dim num_attention_heads n_head n_heads "
        "num_key_value_heads num_kv_heads kv_lora_rank num_global_key_value_heads swa_num_key_value_heads "
        "qk_rope_head_dim"),
    "an integer from 1 to 9999": (_integer(1, 10**4),
        "num_hidden_layers n_layer n_layers num_layers attn_layer_period full_attention_interval "
        "global_attn_every_n_layers"),
    "an integer from 0 to 9999": (_integer(0, 10**4),
        "attn_layer_offset first_k_dense_replace max_window_layers no_rope_layer_interval num_kv_shared_layers "
        "prefix_dense_sliding_window_pattern"),
    "an integer": (_integer(-(10**10)),
        "sliding_window sliding_window_size attention_window_size local_attention attention_chunk_size index_topk "
        "indexer_budget"),
    "a positive number below 1e+15": (_positive,
        "factor rotary_emb_base rope_local_base_freq partial_rotary_factor rotary_pct alpha mixed_b"),
    "a number, 0 or larger": (_number, "mscale mscale_all_dim long_mscale"),
    "a positive number, or a list by layer": (_or(_positive, _list_of(_number)),
        "rope_theta swa_rope_theta compress_rope_theta global_rope_theta local_rope_theta"),
    "true or false": (lambda value: isinstance(value, bool),
        "use_sliding_window alibi multi_query new_decoder_architecture use_dynamic_ntk"),
    "a name": (_text, "model_type rope_type type"),
    "a list of names": (_list_of(_text), "architectures layer_types layers_block_type mlp_layer_types"),
    "a list of integers": (_list_of(_integer(0)),
        "mrope_section xdrope_section compress_ratios attn_layer_indices full_attn_idxs no_rope_layers "
        "hybrid_layer_pattern"),
    "a list of numbers": (_list_of(_or(_number, lambda value: value is None)),
        "partial_rotary_factors attention_windows"),
    "an integer from 1 to 9999, or letters": (_or(_integer(1, 10**4), _text), "sliding_window_pattern"),
    "letters": (_text, "hybrid_override_pattern"),
    "an object": (lambda value: isinstance(value, dict),
        "rope_parameters rope_scaling text_config attn_config per_layer_config dual_chunk_attention_config "
        "full_attention sliding_attention"),
}
# fmt: on
_TABLE = {name: (expected, fits) for expected, (fits, names) in _KINDS.items() for name in names.split()}
_BASES = _KINDS["a positive number, or a list by layer"][1].split()


def check_fields(config: dict[str, Any], family: Family) -> None:
    """Check every field that ropecli reads, null apart, which means that it is absent. Raises CheckpointError."""
    for key, value in entries(config):
        expected, fits = _TABLE.get(key, ("", None))
        in_list = key in _BASES and isinstance(value, list) and not family.lists_of_bases
        if fits and value is not None and (in_list or not fits(value)):
            raise CheckpointError(f"{key} in config.json is {shown(value)}; expected {expected}.")


def entries(part: dict[str, Any], *, inside: bool = False) -> Iterable[tuple[str, Any]]:
    """The fields of a part of config.json, and of the objects in it that have RoPE fields."""
    for key, value in part.items():
        yield key, value
        if isinstance(value, dict) and (inside or key in _TABLE):
            yield from entries(value, inside=key != "text_config")


def section_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part with the RoPE fields: the whole config or, for composite models, `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def first(section: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """The value of the first of `keys` that is present and not null; otherwise None."""
    return next((section[key] for key in keys if section.get(key) is not None), None)


def draft_layers(section: dict[str, Any]) -> int:
    """The number of layers for multi-token prediction (MTP), which draft tokens for speculative decoding."""
    count = first(section, _DRAFT_LAYERS)
    return count if isinstance(count, int) else 0


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether the model only drafts tokens for another one, its target, as EAGLE-3 does."""
    names = " ".join(map(str, config.get("architectures") or ()))
    return "draft_vocab_size" in config or "speculators_config" in config or any(name in names for name in _DRAFTERS)


def head_dim(section: dict[str, Any], family: Family, layer_type: str | None = None) -> int:
    """Width of a head: MLA's rotary part, head_dim (possibly of the layer type), or hidden_size / attention heads."""
    names = family.names_of("head_dim")
    if section.get(LATENT) is not None and LATENT not in names:
        return section[LATENT]
    by_type = family.layers.get(layer_type or "", {}).get("head_dim")
    if by_type is not None and section.get("per_layer_config") is None:  # Gemma 4, as shipped
        key = "global_head_dim" if family.sees_whole_context(layer_type) else "head_dim"
        return section.get(key) or by_type
    if (width := first(of_layer(section, layer_type), names)) is not None:
        return width
    if family.head_dim is not None and "head_dim" not in section:
        return family.head_dim
    return number_of(section, family, "hidden_size") // number_of(section, family, "num_attention_heads")


def number_of(section: dict[str, Any], family: Family, key: str) -> int:
    """The number under `key`, or the model type's default: parts of multimodal models often name only what differs.

    Raises CheckpointError if there is neither.
    """
    number = first(section, names := family.names_of(key)) or getattr(family, key)
    if number is None:
        raise CheckpointError(f"config.json has no {' or '.join(names)}; expected a positive integer.")
    return number


def rotary_dim(section: dict[str, Any], head: int, share: Any) -> int:
    """Width of the rotary part of a head: `share` of the head, or all of it."""
    if section.get(LATENT) is not None:
        share = 1.0  # `head` is the rotary part already; a share in config.json refers to the whole head
    width = int(head * (1.0 if share is None else share))
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
