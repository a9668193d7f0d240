"""Defaults and RoPE properties of each `model_type`.

families.json has the defaults of transformers' config classes (made by scripts/make_families.py). BY_HAND comes from
transformers' modeling code. A test checks both against all model types.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).with_name("families.json")

# Names of longrope's attention factor, for sequences up to the pretraining length and for longer ones.
MSCALES = ("short_mscale", "long_mscale")
_NEOX = ("rotary_emb_base", "rotary_pct")
_BY_KIND = {"full_attention": "rope_theta", "sliding_attention": "rope_theta"}
_LOCAL_BASE = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
_BERT_BASES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
_TWO_LEVELS = "its language model is two levels deep, in thinker_config"
BY_HAND: dict[str, set[str] | dict[str, Any]] = {
    # The only supported rope_types.
    "rope_types": {
        "cosmos3_edge_text": ("default",),
        **dict.fromkeys(("phi3", "phi4_multimodal", "phimoe"), ("default", "longrope")),
    },
    "reads_mscales": {"phimoe"},
    # `dynamic` with `alpha` is static: its base is rope_theta * alpha^(d/(d-2)).
    "reads_alpha": {"hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text"},
    # Attention multiplies the softmax scale by mscale_all_dim, as in DeepSeek.
    "reads_mscale_all_dim": {
        *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
        *("glm_moe_dsa", "hy_v4", "longcat_flash", "minicpm3", "mistral4", "mistral_large4_text", "youtu"),
    },
    # Read the rotary width from `rotary_dim`, which other model types ignore.
    "reads_rotary_dim": {"minimax_m2"},
    # transformers 4 refuses any other key in rope_scaling.
    "bare_longrope": {"phi3", "phi4_multimodal"},
    # transformers 4 accepts only `type` (linear or dynamic) and `factor` in rope_scaling.
    "two_fields": {"olmo", "olmo2"},
    # Older fields of model types with a rope per layer type: the name of the base, which may hold a list by layer.
    "flat_bases": {
        "deepseek_v4": {"main": "rope_theta", "compress": "compress_rope_theta"},
        "dots3_note_text": {"indexed_attention": "rope_theta", "sliding_attention": "swa_rope_theta"},
        "mimo_v2_flash": {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"},
        **dict.fromkeys(("gemma3_text", "gemma3n_text"), _LOCAL_BASE),
        **dict.fromkeys(("modernbert", "modernbert-decoder"), _BERT_BASES),
        **dict.fromkeys(("neomme", "olmo3", "step3p5", "ultrabert"), _BY_KIND),
    },
    # In transformers 4, the older fields scale only the layers that see the whole context.
    "flat_means_full": {"gemma3_text", "gemma3n_text", "olmo3"},
    # The layer types that rope_scaling scales. transformers fails on the rope_scaling of the others.
    "flat_scaling": {
        "deepseek_v4": ("compress",),
        **dict.fromkeys(("gemma3_text", "gemma3n_text", "olmo3", "step3p5"), ("full_attention",)),
        **dict.fromkeys(("modernbert", "modernbert-decoder"), ("full_attention", "sliding_attention")),
    },
    # transformers knows only rope_parameters of these, and ignores the fields of the released config.json.
    "ignores_flat_bases": {"mimo_v2_flash"},
    # A yarn without attention_factor in rope_scaling does not scale the logits.
    "yarn_keeps_logits": {"deepseek_v4"},
    # Own names of base and rotary share, read unless rope_scaling repeats them.
    "own_names": {"gpt_neox": _NEOX, "gpt_neox_japanese": _NEOX},
    # The rotary table of a layer type, where their names differ.
    "rope_of": {
        "deepseek_v4": {
            "sliding_attention": "main",
            **dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), "compress"),
        },
    },
    # Local layer types that their names do not show.
    "local_layers": {"deepseek_v4": ("main",)},
    # (key, value) that enables rotary embeddings.
    "switch": {"granitemoehybrid": ("position_embedding_type", "rope"), "zamba2": ("use_mem_rope", True)},
    # With a sliding_window, all layers slide; other model types mix layers, or do not read it.
    "slides_throughout": {
        *("doge", "minimax", "ministral", "ministral3", "mistral", "mixtral", "phi3", "phi4_multimodal", "phimoe"),
        *("starcoder2", "voxtral_realtime_text"),
    },
    # The only layer type that rotates by default. Only the modeling code says that full-attention layers of these have
    # no positions; families.json has the types whose fields say it.
    "rotates_only_in": dict.fromkeys(
        ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"), "sliding_attention"
    ),
    # The dense layers at the start, which see the whole context, rotate as well.
    "dense_layers_rotate": {"cohere2_moe"},
    # Bases are lists by layer.
    "lists_of_bases": {"step3p5"},
    # Layers with a window have this many times the key-value heads of the others.
    "sliding_groups": {"mimo_v2_flash": 2},
    # Each decoder layer has two attentions.
    "two_attentions": {"longcat_flash"},
    # Why the model type cannot be patched.
    "refused": {
        "blt": "its config.json contains the configs of several transformers, each with its own positions",
        "ernie4_5_vl_moe_text": "its rotary module sorts the frequencies by image axis and reads no scaling",
        "qwen2_5_omni": _TWO_LEVELS,
        "qwen3_omni_moe": _TWO_LEVELS,
        "recurrent_gemma": "attention is limited to the last attention_window_size tokens, so the context cannot be "
        "extended",
    },
}
"""Fields of Family by model type."""
_LOCAL_WORDS = ("sliding", "local", "chunked")
# Names used by model types that transformers does not have. Its own types read one name, or those in families.json.
COMMON_NAMES = {
    "max_position_embeddings": (
        *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"),
    ),
    "head_dim": ("head_dim", "attention_head_dim"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
}


@dataclass(frozen=True)
class Family:
    """Properties of one model_type.

    known: listed in families.json. rotary: has rotary embeddings that config.json configures. rope_theta,
    partial_rotary_factor, head_dim, hidden_size, num_attention_heads, num_key_value_heads, num_hidden_layers,
    max_position_embeddings: defaults of absent keys; None if derived or required. null_head_dim: an absent head_dim is
    null. layers: defaults by layer type, if each has its own rope. names: keys with several names (transformers'
    attribute_map), the preferred one first. scaled: scaled by default, without RoPE fields. new: transformers 4.57 does
    not have the type. rope_types: None for all. pattern: one period of the default layer_types, ("",) if they have
    none. rotates: one period of whether a layer rotates, 0 or 1. Other fields: see BY_HAND.
    """

    model_type: str | None
    known: bool = False
    rotary: bool = True
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    head_dim: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_hidden_layers: int | None = None
    null_head_dim: bool = False
    max_position_embeddings: int | None = None
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    scaled: bool = False
    new: bool = False
    rope_types: tuple[str, ...] | None = None
    reads_mscales: bool = False
    reads_alpha: bool = False
    reads_mscale_all_dim: bool = False
    reads_rotary_dim: bool = False
    bare_longrope: bool = False
    two_fields: bool = False
    flat_means_full: bool = False
    flat_bases: dict[str, str] = field(default_factory=dict)
    flat_scaling: tuple[str, ...] = ()
    ignores_flat_bases: bool = False
    yarn_keeps_logits: bool = False
    own_names: tuple[str, str] | None = None
    local_layers: tuple[str, ...] = ()
    switch: tuple[str, Any] | None = None
    slides_throughout: bool = False
    rotates_only_in: str | None = None
    pattern: tuple[str, ...] = ()
    rotates: tuple[int, ...] = ()
    rope_of: dict[str, str] = field(default_factory=dict)
    dense_layers_rotate: bool = False
    two_attentions: bool = False
    lists_of_bases: bool = False
    sliding_groups: int = 1
    refused: str | None = None

    def names_of(self, key: str) -> tuple[str, ...]:
        """Possible names of `key` in config.json. The first one present is read."""
        return tuple(self.names.get(key, (key,))) if self.known else COMMON_NAMES[key]

    def sees_whole_context(self, layer_type: str | None) -> bool:
        """False for layers with a sliding or chunked window, which scaling would only harm."""
        name = layer_type or ""
        return name not in self.local_layers and not any(word in name for word in _LOCAL_WORDS)


def family_of(config: dict[str, Any]) -> Family:
    """The family of the text decoder in config.json; without defaults if families.json does not list it."""
    outer = config.get("model_type")
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    table = _table()
    inner = None if (outer, inner) == ("kimi_k25", "kimi_k2") else inner  # as transformers reads it
    name = inner or table.get(str(outer), {}).get("text_type") or outer
    return _family(name if isinstance(name, str) else None)


def ignores_top_level(config: dict[str, Any]) -> bool:
    """Return whether transformers reads the language model's fields only from text_config, which is missing."""
    entry = _table().get(str(config.get("model_type")), {})
    return "text_type" in entry and not entry.get("reads_top_level") and not isinstance(config.get("text_config"), dict)


def is_known(config: dict[str, Any]) -> bool:
    """Return whether families.json lists the model_type of config.json."""
    return str(config.get("model_type")) in _table()


@cache
def _family(name: str | None) -> Family:
    listed = _table().get(name or "", {})
    entry = {key: value for key, value in listed.items() if key not in ("text_type", "reads_top_level")}
    for key, types in BY_HAND.items():
        if name and name in types:
            entry.setdefault(key, types[name] if isinstance(types, dict) else True)
    return Family(name, name in _table(), **entry)


@cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(_DATA.read_text(encoding="utf-8"))
