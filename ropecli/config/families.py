"""Defaults and RoPE properties of each `model_type`.

families.json has the defaults of transformers' config classes (made by scripts/make_families.py). The sets below come
from transformers' modeling code. A test checks both against all model types.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).with_name("families.json")

# Model types that support only these rope_types.
_ROPE_TYPES = {
    "cosmos3_edge_text": ("default",),
    "phi3": ("default", "longrope"),
    "phi4_multimodal": ("default", "longrope"),
    "phimoe": ("default", "longrope"),
}
# Names of longrope's attention factor, for sequences up to the pretraining length and for longer ones.
MSCALES = ("short_mscale", "long_mscale")
_READS_MSCALES = {"phimoe"}
# Attention multiplies the softmax scale by mscale_all_dim, as in DeepSeek.
_READS_MSCALE_ALL_DIM = {
    "axk1",
    "axk2",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "hy_v4",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "mistral_large4_text",
    "youtu",
}
# transformers 4 refuses any other key in rope_scaling.
_BARE_LONGROPE = {"phi3", "phi4_multimodal"}
# transformers 4 accepts only `type` (linear or dynamic) and `factor` in rope_scaling.
_TWO_FIELDS = {"olmo", "olmo2"}
# Older fields of model types with a rope per layer type: the name of the base, which may hold a list by layer.
_FLAT_BASES = {
    "deepseek_v4": {"main": "rope_theta", "compress": "compress_rope_theta"},
    "dots3_note_text": {"indexed_attention": "rope_theta", "sliding_attention": "swa_rope_theta"},
    "gemma3_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "gemma3n_text": {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"},
    "mimo_v2_flash": {"full_attention": "rope_theta", "sliding_attention": "swa_rope_theta"},
    "modernbert": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "modernbert-decoder": {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"},
    "neomme": {"full_attention": "rope_theta", "sliding_attention": "rope_theta"},
    "olmo3": {"full_attention": "rope_theta", "sliding_attention": "rope_theta"},
    "step3p5": {"full_attention": "rope_theta", "sliding_attention": "rope_theta"},
    "ultrabert": {"full_attention": "rope_theta", "sliding_attention": "rope_theta"},
}
# Those of transformers 4. There, the older fields scale only the layers that see the whole context.
_FLAT_MEANS_FULL = {"gemma3_text", "gemma3n_text", "olmo3"}
# The layer types that rope_scaling scales. transformers fails on the rope_scaling of the others.
_FLAT_SCALING = {
    **dict.fromkeys((*_FLAT_MEANS_FULL, "step3p5"), ("full_attention",)),
    "deepseek_v4": ("compress",),
    "modernbert": ("full_attention", "sliding_attention"),
    "modernbert-decoder": ("full_attention", "sliding_attention"),
}
# transformers knows only rope_parameters of these, and ignores the fields of the released config.json.
_IGNORES_FLAT_BASES = {"mimo_v2_flash"}
# A yarn without attention_factor in rope_scaling does not scale the logits.
_YARN_KEEPS_LOGITS = {"deepseek_v4"}
# Own names of base and rotary share, read unless rope_scaling repeats them.
_OWN_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}
# Local layer types that their names do not show.
_LOCAL_LAYERS = {"deepseek_v4": ("main",)}
# Layer types with compressors, which rotate by their own positions.
_OWN_POSITIONS = {"deepseek_v4": ("compress",)}
# (key, value) that enables rotary embeddings.
_SWITCHES = {
    "granitemoehybrid": ("position_embedding_type", "rope"),
    "zamba2": ("use_mem_rope", True),
}
# With a sliding_window, all layers slide; other model types mix layers, or do not read it.
_SLIDE_THROUGHOUT = {
    "doge",
    "minimax",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "phi3",
    "phi4_multimodal",
    "phimoe",
    "starcoder2",
}
# Only the modeling code says that full-attention layers have no positions. families.json has those whose fields say it.
_ROTATES_ONLY_IN = dict.fromkeys(
    ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"), "sliding_attention"
)
# The dense layers at the start, which see the whole context, rotate as well.
_DENSE_LAYERS_ROTATE = {"cohere2_moe"}
# Read the rotary width from `rotary_dim`, which other model types ignore.
_READS_ROTARY_DIM = {"minimax_m2"}
_REFUSED = {
    "blt": "its config.json contains the configs of several transformers, each with its own positions",
    "ernie4_5_vl_moe_text": "its rotary module sorts the frequencies by image axis and reads no scaling",
    "qwen2_5_omni": "its language model is two levels deep, in thinker_config",
    "qwen3_omni_moe": "its language model is two levels deep, in thinker_config",
    "recurrent_gemma": "attention is limited to the last attention_window_size tokens, so the context cannot be "
    "extended",
}
_LOCAL_WORDS = ("sliding", "local", "chunked")
# Names used by model types that transformers does not have. Its own types read one name, or those in families.json.
COMMON_NAMES = {
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
    ),
    "head_dim": ("head_dim", "attention_head_dim"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
}


@dataclass(frozen=True)
class Family:
    """Properties of one model_type.

    known: listed in families.json. rotary: has rotary embeddings that config.json configures. rope_theta,
    partial_rotary_factor, head_dim, hidden_size, num_attention_heads, max_position_embeddings: defaults of absent keys;
    None if derived or required. fills_head_dim: the default also replaces a head_dim of null. null_head_dim: an absent
    head_dim is null. layers: defaults by layer type, if each has its own rope. names: keys with several names
    (transformers' attribute_map), the preferred one first. scaled: scaled by default, without RoPE fields. new:
    transformers 4.57 does not have the type. rope_types: supported rope_types; None for all. rotates_only_in: the only
    layer type that rotates by default. switch: (key, value) that enables rotary embeddings. refused: why the model type
    cannot be patched. Other fields: see the sets above.
    """

    model_type: str | None
    known: bool = False
    rotary: bool = True
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    head_dim: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    fills_head_dim: bool = False
    null_head_dim: bool = False
    max_position_embeddings: int | None = None
    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    scaled: bool = False
    new: bool = False
    rope_types: tuple[str, ...] | None = None
    reads_mscales: bool = False
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
    own_positions: tuple[str, ...] = ()
    switch: tuple[str, Any] | None = None
    slides_throughout: bool = False
    rotates_only_in: str | None = None
    dense_layers_rotate: bool = False
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
    entry = dict(_table().get(name or "", {}))
    for key in ("text_type", "reads_top_level"):
        entry.pop(key, None)
    entry.setdefault("rotates_only_in", _ROTATES_ONLY_IN.get(name or ""))
    return Family(
        model_type=name,
        known=name in _table(),
        **entry,
        rope_types=_ROPE_TYPES.get(name or ""),
        reads_mscales=name in _READS_MSCALES,
        reads_mscale_all_dim=name in _READS_MSCALE_ALL_DIM,
        reads_rotary_dim=name in _READS_ROTARY_DIM,
        bare_longrope=name in _BARE_LONGROPE,
        two_fields=name in _TWO_FIELDS,
        flat_means_full=name in _FLAT_MEANS_FULL,
        flat_bases=_FLAT_BASES.get(name or "", {}),
        flat_scaling=_FLAT_SCALING.get(name or "", ()),
        ignores_flat_bases=name in _IGNORES_FLAT_BASES,
        yarn_keeps_logits=name in _YARN_KEEPS_LOGITS,
        own_names=_OWN_NAMES.get(name or ""),
        local_layers=_LOCAL_LAYERS.get(name or "", ()),
        own_positions=_OWN_POSITIONS.get(name or "", ()),
        switch=_SWITCHES.get(name or ""),
        slides_throughout=name in _SLIDE_THROUGHOUT,
        dense_layers_rotate=name in _DENSE_LAYERS_ROTATE,
        refused=_REFUSED.get(name or ""),
    )


@cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(_DATA.read_text(encoding="utf-8"))
