"""Pretraining lengths and extensions of released models, as published by their makers.

config.json says what a reader computes, not what was trained: Qwen2.5-7B has max_position_embeddings 131072 and was
trained to 32,768 tokens. A row matches by fields of config.json, so it also holds for renamed and fine-tuned copies.
"""

from typing import Any, NamedTuple

from ropecli.config.changes import get_path


class Extension(NamedTuple):
    """The scaling with which the makers extend their model. trained: only after training with it."""

    method: str
    factor: float
    source: str
    trained: bool = False


class Makers(NamedTuple):
    """pretraining_length: tokens. source: where the makers state it; in_config: in a key of config.json of their own.

    extension: None if the makers publish none. longest: the largest max_position_embeddings that they ship without a
    scaling; None if unknown.
    """

    pretraining_length: int
    source: str
    in_config: bool
    extension: Extension | None
    longest: int | None = None


class _Above(NamedTuple):
    least: int


class _Row(NamedTuple):
    """fields: value, set of values, or _Above by config key, or by the fields that find_makers is given.

    Rows match unscaled configs unless `scaling` is given. length: tokens, or the config key (with dots) that has them.
    """

    model: str
    types: tuple[str, ...]
    fields: dict[str, Any]
    length: int | str
    source: str
    extension: Extension | None = None
    longest: int | None = None


_QWEN_CARDS = "Qwen's model cards"
_QWEN_YARN = Extension("yarn", 4.0, _QWEN_CARDS)
_IMAGES = Extension("yarn", 3.0, f"{_QWEN_CARDS}: positions of images grow more slowly than tokens, so 3 reaches 1M")
_STAGES = Extension("llama3", 8.0, "Llama 3 report, section 3.4.2: six stages of training", trained=True)
_QWEN2 = {"rope_theta": 1e6, "max_position_embeddings": _Above(32768)}
_QWEN3 = {"rope_theta": 1e7, "max_position_embeddings": _Above(262144)}
_MISTRAL = {"rope_theta": 1e4, "sliding_window": 4096, "max_position_embeddings": 32768}
_GEMMA = {"scaling": {"linear"}, "factor": 8, "max_position_embeddings": _Above(131072)}
_LLAMA4 = {"scaling": {"none", "llama3"}, "hidden_size": 5120, "vocab_size": 202048}
_LLAMA3 = {"rope_theta": 5e5, "max_position_embeddings": 8192, "vocab_size": 128256}
_LLAMA2 = {"rope_theta": 1e4, "vocab_size": 32000, "rms_norm_eps": 1e-5, "hidden_size": {4096, 5120, 8192}}
_LLAMA2 |= {"pretraining_tp": 1}  # Llama 1 has none
_LLAMA2_70B: dict[str, Any] = {"rope_theta": 1e4, "vocab_size": 32000, "hidden_size": 8192, "num_key_value_heads": 8}
_LLAMA2_70B |= {"max_position_embeddings": {2048, 4096}}
_LLAMA2_REPORT = "Llama 2 report, arXiv:2307.09288, table 1"
_CODER = {"scaling": {"linear"}, "factor": 4, "rope_theta": 1e5, "max_position_embeddings": 16384}
# fmt: off
_ROWS = (
    _Row("Qwen", ("qwen",), {"scaling": {"none", "dynamic"}}, "seq_length",
         "seq_length in config.json; Qwen's README"),
    _Row("Qwen2.5-1M", ("qwen2", "qwen3", "qwen3_moe"), {},
         "dual_chunk_attention_config.original_max_position_embeddings",
         "dual_chunk_attention_config in config.json; Qwen2.5-1M report, arXiv:2501.15383"),
    _Row("Qwen2, Qwen2.5, QwQ", ("qwen2", "qwen2_moe"), _QWEN2, 32768,
         "Qwen2 and Qwen2.5 reports, arXiv:2407.10671, arXiv:2412.15115", _QWEN_YARN),
    _Row("Qwen2-VL, Qwen2.5-VL", ("qwen2_vl_text", "qwen2_5_vl_text"), _QWEN2, 32768,
         "Qwen2.5-VL report, arXiv:2502.13923; model cards", _QWEN_YARN),
    _Row("Qwen3", ("qwen3", "qwen3_moe"), _QWEN2, 32768, "Qwen3 report, arXiv:2505.09388", _QWEN_YARN),
    _Row("Qwen3-VL", ("qwen3_vl_text", "qwen3_vl_moe_text"), {"max_position_embeddings": 262144}, 262144,
         _QWEN_CARDS, _IMAGES),
    _Row("Qwen3-2507, Qwen3-Coder, Qwen3-Next, Qwen3.5",
         ("qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN3, 262144, _QWEN_CARDS, _QWEN_YARN,
         262144),
    _Row("Qwen3-4B-2507", ("qwen3",), {**_QWEN3, "rope_theta": 5e6}, 262144, _QWEN_CARDS, _QWEN_YARN, 262144),
    _Row("Mistral 7B v0.1", ("mistral",), _MISTRAL, 8192, "Mistral 7B report, arXiv:2310.06825, table 1"),
    _Row("Mistral NeMo", ("mistral",), {"max_position_embeddings": 1024000}, 131072,
         "Mistral NeMo's announcement, 2024"),
    _Row("Gemma 3", ("gemma3_text",), _GEMMA, 32768, "Gemma 3 report, arXiv:2503.19786, section 2.1"),
    _Row("Llama 4", ("llama4_text",), _LLAMA4, 262144, "Meta's Llama 4 announcement, 2025"),
    _Row("Llama 3", ("llama",), _LLAMA3, 8192, "Llama 3 report, arXiv:2407.21783", _STAGES),
    # the first revisions on the Hub named 2048; Llama 1 has no groups of heads
    _Row("Llama 2 70B", ("llama",), _LLAMA2_70B, 4096, _LLAMA2_REPORT),
    _Row("Llama 2", ("llama",), {**_LLAMA2, "max_position_embeddings": {2048, 4096}}, 4096, _LLAMA2_REPORT),
    _Row("Llama 2, extended", ("llama",), {**_LLAMA2, "scaling": {"linear"}}, 4096, _LLAMA2_REPORT),
    _Row("DeepSeek-Coder", ("llama",), _CODER, 4096, "DeepSeek-Coder report, arXiv:2401.14196"),
    _Row("DeepSeek-V2, V3, R1", ("deepseek_v2", "deepseek_v3"), {"scaling": {"yarn"}, "factor": 40}, 4096,
         "DeepSeek-V2 and V3 reports, arXiv:2405.04434, arXiv:2412.19437: trained with YaRN to 128K"),
    _Row("gpt-oss", ("gpt_oss",), {"scaling": {"yarn"}, "factor": 32}, 4096,
         "gpt-oss model card, arXiv:2508.10925: extended to 131,072 with YaRN"),
    _Row("SmolLM3", ("smollm3",), {"max_position_embeddings": 65536}, 65536, "SmolLM3's model card",
         Extension("yarn", 2.0, "SmolLM3's model card")),
)
# fmt: on


def find_makers(section: dict[str, Any], model_type: str | None, **read: object) -> Makers | None:
    """The first row that matches config.json, or None.

    section: the part with the RoPE fields. read: fields as read from any dialect or from defaults: scaling (the
    shipped method, `none` if there is none), factor, rope_theta, max_position_embeddings.
    """
    fields = {**section, **read}
    for row in _ROWS:
        conditions = {"scaling": {"none"}, **row.fields}
        if model_type not in row.types or not all(_fits(fields.get(key), is_) for key, is_ in conditions.items()):
            continue
        length = get_path(section, row.length) if isinstance(row.length, str) else row.length
        if isinstance(length, int) and not isinstance(length, bool) and length > 0:
            return Makers(length, row.source, isinstance(row.length, str), row.extension, row.longest)
    return None


def released_bases(section: dict[str, Any], model_type: str | None) -> set[float]:
    """The bases of the rows that match apart from base, scaling, and the length of models that their sizes tell."""
    bases = set()
    for row in _ROWS:
        apart = {"rope_theta", *({"max_position_embeddings"} if "vocab_size" in row.fields else ())}
        conditions = [(section.get(key), is_) for key, is_ in row.fields.items() if key not in apart]
        if model_type in row.types and "rope_theta" in row.fields and all(_fits(*pair) for pair in conditions):
            bases.add(row.fields["rope_theta"])
    return bases


def _fits(value: Any, expected: Any) -> bool:
    if isinstance(expected, _Above):
        return isinstance(value, int) and value >= expected.least
    return value in expected if isinstance(expected, set) else value == expected
