"""The attention and positions of each decoder layer, as config.json and the model type say it."""

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ropecli.config.families import Family
from ropecli.config.fields import LATENT, first, head_dim, number_of, of_layer
from ropecli.errors import CheckpointError

FULL, SLIDING, CHUNKED, SPARSE, COMPRESSED = "full", "sliding", "chunked", "sparse", "compressed"
RECURRENT, OTHER = "recurrent", "other"
_LABELS = {
    SLIDING: ("sliding", "local"),
    CHUNKED: ("chunked",),
    RECURRENT: ("linear", "mamba", "recurrent", "conv"),
    COMPRESSED: ("compressed",),
    SPARSE: ("indexed", "sparse"),
    OTHER: ("moe", "mlp"),  # feed-forward layers, which Nemotron-H counts as layers
}
"""Parts of the names in layer_types. All other names see the whole context."""
WINDOWS = {
    SLIDING: ("sliding_window", "sliding_window_size", "attention_window_size", "local_attention"),
    CHUNKED: ("attention_chunk_size",),
    SPARSE: ("index_topk", "indexer_budget"),
}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "L": "sliding_attention", "G": "full_attention"}
"""In hybrid_override_pattern and sliding_window_pattern. All others are feed-forward layers."""
_RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
"""In compress_ratios."""
_INTERVALS = ("sliding_window_pattern", "full_attention_interval", "global_attn_every_n_layers")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
BFLOAT16 = 2
"""Bytes of a value."""


class Layer(NamedTuple):
    """The attention and positions of one decoder layer.

    attention: full, sliding, chunked, sparse, compressed (several earlier tokens as one, and a window), recurrent
    (linear attention, state spaces, convolutions), other (no token sees another), or None if unknown. rotates: whether
    it has rotary positions, None if unknown. far: whether its attention sees the whole context, or may. rope: the layer
    type of its rotary table, None if all layers share one. window: the tokens that it sees, or that a sparse layer
    chooses; None for all, or if unknown.
    """

    attention: str | None
    rotates: bool | None
    far: bool
    rope: str | None = None
    window: int | None = None


def limit_of_far(layers: Sequence[Layer]) -> str:
    """The beginning of a sentence on layers that do not see the whole context, or do not rotate; empty if all do."""
    far = [layer for layer in layers if layer.far]
    rotating = sum(layer.rotates is not False for layer in far)
    if not far:
        widest = max(layer.window or 0 for layer in layers)
        return f"no layer sees further than {widest} tokens (its window in config.json)"
    if not rotating:
        return "no layer that sees the whole context has rotary positions"
    several = f"only {rotating} of the {len(far)} layers that see the whole context have rotary positions"
    return several if rotating < len(far) else ""


def no_effect(layers: Sequence[Layer], method: object = "a scaling") -> str:
    return (
        f"{limit_of_far(layers)}, so {method} has no effect on distant tokens. Use --method none --target-length N to "
        "only raise the context length."
    )


def acts_nowhere(layers: Sequence[Layer]) -> str:
    """A sentence if no layer that sees the whole context rotates, so that no scaling can act; else empty."""
    if any(layer.attention is None or (layer.far and layer.rotates is not False) for layer in layers):
        return ""
    sentence = no_effect(layers)
    return sentence[0].upper() + sentence[1:]


def read_layers(section: dict[str, Any], family: Family, ropes: Collection[str | None] = (None,)) -> tuple[Layer, ...]:
    """The layers, in order; if their number is not known, one period of their pattern.

    section: the part of config.json with the RoPE fields. ropes: the layer types that have a rotary table.
    """
    labels = layer_labels(section, family)
    count = _count(section, family) or len(labels)
    dense = _dense(section, family)
    labels = ["full_attention" if at < dense else labels[at % len(labels)] for at in range(count)]
    rotates = _rotates(section, family, labels, dense)
    longest = first(section, family.names_of("max_position_embeddings"))
    # if all layers are alike, a window as wide as the context limits nothing
    unlimited = longest if longest and len(set(labels)) == 1 and None in ropes else math.inf

    def layer(label: str, rotates: bool | None) -> Layer:
        attention = attention_of(label)
        window = first(section, WINDOWS.get(attention or "", ()))
        window = window if window and window > 0 else None
        # where each kind has a rope, its name tells enough
        if attention in (SLIDING, CHUNKED) and None in ropes and _has_no_window(section, attention):
            attention = FULL
        near = attention in (SLIDING, CHUNKED) and not (window and window >= unlimited)
        rope = None if None in ropes or not label else family.rope_of.get(label, label)
        if attention in (RECURRENT, OTHER) or not family.rotary or (label and rope not in ropes):
            rotates, rope = False, None
        return Layer(attention, rotates, not near and attention not in (RECURRENT, OTHER), rope, window)

    return tuple(layer(label, rotates[at % len(rotates)]) for at, label in enumerate(labels))


def _count(section: dict[str, Any], family: Family) -> int | None:
    """The number of layers; None if neither config.json nor the model type says it."""
    return first(section, _COUNTS) or family.num_hidden_layers


def layer_labels(section: dict[str, Any], family: Family) -> list[str]:
    """The name of each layer's kind, or one period of them. A name is empty where only the model's code knows it."""
    for key in ("layer_types", "layers_block_type"):
        if labels := section.get(key):
            return list(labels)
    for key in ("hybrid_override_pattern", "sliding_window_pattern"):
        if isinstance(letters := section.get(key), str) and letters:
            return [_LETTERS.get(letter, "mlp") for letter in letters]
    if windows := section.get("attention_windows") or section.get("hybrid_layer_pattern"):
        return ["sliding_attention" if window else "full_attention" for window in windows]
    if ratios := section.get("compress_ratios"):
        return [_RATIOS.get(ratio, "") for ratio in ratios]
    for key in ("attn_layer_indices", "full_attn_idxs"):
        if (chosen := section.get(key)) is not None:
            count = _count(section, family) or max(chosen, default=0) + 1
            return ["full_attention" if at in chosen else "linear_attention" for at in range(count)]
    if every := section.get("attn_layer_period"):
        at = section.get("attn_layer_offset") or 0
        return ["full_attention" if index == at else "linear_attention" for index in range(every)]
    window = section.get("sliding_window")
    slides = bool(window and window > 0 and section.get("use_sliding_window", True))
    if slides and section.get("use_sliding_window") and (below := section.get("max_window_layers")) is not None:
        return ["full_attention"] * below + ["sliding_attention"] * ((_count(section, family) or below + 1) - below)
    if (every := first(section, _INTERVALS)) and "full_attention" in family.pattern and len(set(family.pattern)) == 2:
        labels = [next(label for label in family.pattern if label != "full_attention")] * every
        labels[0 if family.pattern[0] == "full_attention" else -1] = "full_attention"
        return labels
    if family.pattern:
        return list(family.pattern)
    return ["sliding_attention" if slides and family.slides_throughout else "full_attention" if family.known else ""]


def _rotates(section: dict[str, Any], family: Family, labels: list[str], dense: int) -> Sequence[bool | None]:
    """Whether each layer rotates, or one period of it. dense: see _dense."""
    for key in ("no_rope_layers", "layer_rope_theta"):  # 0 for layers without positions
        if listed := section.get(key):
            return [bool(value) for value in listed]
    if family.rotates:
        every = section.get("no_rope_layer_interval")
        return [True] * (every - 1) + [False] if every else list(map(bool, family.rotates))
    only = family.rotates_only_in
    if only is None or _has_no_window(section, attention_of(only) or SLIDING):
        return [True if label else None for label in labels]
    return [label == only or at < dense for at, label in enumerate(labels)]


def _dense(section: dict[str, Any], family: Family) -> int:
    """The number of dense layers at the start that see the whole context and rotate."""
    dense = section.get("first_k_dense_replace") or (section.get("mlp_layer_types") or []).count("dense")
    return dense if family.dense_layers_rotate and section.get("prefix_dense_sliding_window_pattern", 1) == 1 else 0


def _has_no_window(section: dict[str, Any], attention: str) -> bool:
    """Whether config.json says null. Without the key, the model type has a default."""
    given = [section[key] for key in WINDOWS[attention] if key in section]
    return bool(given) and not any(given)


def attention_of(label: str) -> str | None:
    """The kind of attention that a name in layer_types means; None for an empty name."""
    if label == "reference_sliding_attention":  # the whole prompt, and a window of what was generated
        return FULL
    kinds = (kind for kind, parts in _LABELS.items() if any(part in label for part in parts))
    return next(kinds, label and FULL) or None


def kv_cache_bytes(section: dict[str, Any], family: Family, layers: Sequence[Layer], length: int) -> int | None:
    """Bytes of the KV cache of one sequence in bfloat16; None if config.json does not say it.

    Layers with a window keep one token less than the window after a pass (transformers 5.23, cache_utils.py). Recurrent
    layers, and layers that share the cache of others, keep nothing that grows.
    """
    if any(layer.attention in (None, COMPRESSED) for layer in layers):
        return None
    unshared, values = max(0, len(layers) - (section.get("num_kv_shared_layers") or 0)), 0
    try:
        for layer in layers[:unshared]:
            if layer.attention not in (RECURRENT, OTHER):
                tokens = length if layer.far or not layer.window else min(length, layer.window - 1)
                values += tokens * _cached(section, family, layer) * (1 + family.two_attentions)
    except CheckpointError:
        return None
    return BFLOAT16 * values


def _cached(section: dict[str, Any], family: Family, layer: Layer) -> int:
    """The values of a token that an attention keeps in the KV cache. Raises CheckpointError if a size is missing.

    Multi-head latent attention keeps the latent and the rotary part (DeepSeek-V2, arXiv:2405.04434, section 2.1), as
    transformers does (5.23, deepseek_v3).
    """
    section = of_layer(section, layer.rope)
    if section.get("kv_lora_rank"):
        return section["kv_lora_rank"] + (section.get(LATENT) or 0)
    shares_one_head = section.get("multi_query") and not section.get("new_decoder_architecture")
    names = ("num_key_value_heads", "num_kv_heads")
    groups = first(section, ("num_global_key_value_heads" if layer.far else "swa_num_key_value_heads",))
    if groups is None and shares_one_head:
        groups = 1
    elif groups is None:
        groups = first(section, names) or (None if names[0] in section else family.num_key_value_heads)
        groups = groups or number_of(section, family, "num_attention_heads")
        groups *= 1 if layer.far else family.sliding_groups
    width = head_dim({**section, LATENT: None}, family, layer.rope)  # not only the rotary part
    return (width + (section.get("v_head_dim") or width)) * groups
