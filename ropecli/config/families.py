"""What the code behind a `model_type` takes for granted where config.json is silent, and what it refuses.

Defaults come from families.json, which scripts/make_families.py reads off transformers' own config classes; the
sets below are what its modeling code shows and no config class tells. The walk over all types holds both.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).with_name("families.json")

# Types that validate their rope_type, or leave all but these aside.
_ROPE_TYPES = {
    "phi3": ("default", "longrope"),
    "phi4_multimodal": ("default", "longrope"),
    "phimoe": ("default", "longrope"),
}
# Longrope's attention factor goes by these names, for sequences up to the pretraining length and beyond it.
MSCALES = ("short_mscale", "long_mscale")
_READS_MSCALES = {"phimoe"}
# Whose attention multiplies its softmax scale by DeepSeek's mscale_all_dim.
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
    "youtu",
}
# transformers 4 refuses any other key in rope_scaling.
_BARE_LONGROPE = {"phi3", "phi4_multimodal"}
# transformers 4 wants exactly `type` and `factor` in rope_scaling, linear or dynamic.
_TWO_FIELDS = {"olmo", "olmo2"}
# Whose older, flat dialect scales the layers that see the whole context alone.
_FLAT_MEANS_FULL = {"gemma3_text", "gemma3n_text", "olmo3"}
# Read by names of their own, (base, share), where rope_scaling does not repeat them.
_OWN_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}
# Layer types whose names do not say that they look back a few tokens only.
_LOCAL_LAYERS = {"deepseek_v4": ("main",)}
# Layer types whose compressors rotate by positions of their own, beside those of the pass.
_OWN_POSITIONS = {"deepseek_v4": ("compress",)}
# A key that must have a value, or no layer turns anything.
_SWITCHES = {"zamba2": ("use_mem_rope", True), "granitemoehybrid": ("position_embedding_type", "rope")}
# Every layer of these slides where config.json names a sliding_window; others mix their layers, or do not read it.
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
# Where sliding and full layers are mixed, these turn the sliding ones and give the full ones no positions at all.
_ONLY_SLIDING_TURN = {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"}
# Which take the width that turns from `rotary_dim`; in others' configs it may stand and is not read.
_READS_ROTARY_DIM = {"minimax_m2"}
_REFUSED = {
    "blt": "its config.json holds the configs of several transformers, each with positions of its own",
    "recurrent_gemma": "its attention looks back attention_window_size tokens and no further, so that there is "
    "nothing to extend",
}
_LOCAL_WORDS = ("sliding", "local", "chunked")
# What types that transformers does not know call the same. Its own types read one name, or those in families.json.
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
    """One model_type.

    known: whether transformers' release that families.json was made with has it. rotary: whether config.json
    drives rotary embeddings at all. rope_theta, partial_rotary_factor, head_dim, max_position_embeddings: what an
    absent key means; None where it is derived, or must be there. fills_head_dim: whether a head_dim of null means
    the same. layers: defaults by layer type, of types that give each its own rope. names: keys that the type saves
    under another name (transformers' attribute_map), each with both names, the one that wins first. scaled: whether
    absent RoPE fields mean a scaling. rope_types: what the type honours; None for all. switch: (key, value) without
    which nothing turns. refused: why a patch makes no sense.
    """

    model_type: str | None
    known: bool = False
    rotary: bool = True
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    head_dim: int | None = None
    fills_head_dim: bool = False
    max_position_embeddings: int | None = None
    layers: dict[str, dict[str, float]] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    scaled: bool = False
    rope_types: tuple[str, ...] | None = None
    reads_mscales: bool = False
    reads_mscale_all_dim: bool = False
    reads_rotary_dim: bool = False
    bare_longrope: bool = False
    two_fields: bool = False
    flat_means_full: bool = False
    own_names: tuple[str, str] | None = None
    local_layers: tuple[str, ...] = ()
    own_positions: tuple[str, ...] = ()
    switch: tuple[str, Any] | None = None
    slides_throughout: bool = False
    only_sliding_turn: bool = False
    refused: str | None = None

    def names_of(self, key: str) -> tuple[str, ...]:
        """The names that config.json may have for `key`. The first that is there wins."""
        return tuple(self.names.get(key, (key,))) if self.known else COMMON_NAMES[key]

    def sees_whole_context(self, layer_type: str | None) -> bool:
        """False for layers with a sliding or chunked window: they never see far, so scaling only harms them."""
        name = layer_type or ""
        return name not in self.local_layers and not any(word in name for word in _LOCAL_WORDS)


def family_of(config: dict[str, Any]) -> Family:
    """The family of a config.json's text decoder; one that knows nothing for types that are not in the table."""
    outer = config.get("model_type")
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    table = _table()
    name = inner or table.get(str(outer), {}).get("text_type") or outer
    return _family(name if isinstance(name, str) else None)


@cache
def _family(name: str | None) -> Family:
    entry = dict(_table().get(name or "", {}))
    entry.pop("text_type", None)
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
        own_names=_OWN_NAMES.get(name or ""),
        local_layers=_LOCAL_LAYERS.get(name or "", ()),
        own_positions=_OWN_POSITIONS.get(name or "", ()),
        switch=_SWITCHES.get(name or ""),
        slides_throughout=name in _SLIDE_THROUGHOUT,
        only_sliding_turn=name in _ONLY_SLIDING_TURN,
        refused=_REFUSED.get(name or ""),
    )


@cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(_DATA.read_text(encoding="utf-8"))
