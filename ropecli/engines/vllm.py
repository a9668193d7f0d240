"""Options for vLLM, checked in release 0.33.0 (rotary_embedding/__init__.py, config/model.py).

- `--hf-overrides` replaces `rope_parameters` as a whole, last: it must include rope_theta, rope_type and
  partial_rotary_factor.
- Context length: max_position_embeddings, by linear and dynamic times the factor; of longrope the top-level
  original_max_position_embeddings, unless --max-model-len is larger. dynamic also reads max_trained_positions.
- Classes with multi-head latent attention compute DeepSeek's yarn, with mscale and mscale_all_dim, for every scaling.
- A draft (config/speculative.py): MTP layers read config.json. EAGLE-3 drafters read their own; vLLM raises its length,
  never scales it.
- qwen3_5 reads yarn with the sections of multimodal positions. vLLM has had no dual-chunk attention since 0.11.
"""

from typing import Any

from ropecli.config.dialects import Parameters
from ropecli.engines import engine_table as shared
from ropecli.engines.engine_table import Case, EngineInput, EngineTable, Same

_INTERLEAVED = ("cohere", "cohere2", "ernie4_5", "glm", "glm4", "helium")


def _overrides(p: EngineInput) -> dict[str, Any]:
    if p.only_in_config:
        return {} if p.raised else p.in_section({p.length_key: p.length})
    written: dict[Any, Any] = {label: fields and _as_written(fields, p) for label, fields in p.parameters.items()}
    return p.in_section({"rope_parameters": written if p.nested else written[None] or {}, p.length_key: p.length})


def _as_written(parameters: Parameters, p: EngineInput) -> Parameters:
    written = shared.with_engine_names(parameters)
    if written["rope_type"] == "dynamic":
        written["max_trained_positions"] = p.original_length
    return written


def _command(p: EngineInput) -> tuple[object, ...]:
    overrides = _overrides(p)
    options = ("--hf-overrides", overrides) if overrides else ()
    return ("vllm", "serve", p.checkpoint, *p.at_revision, *options, "--max-model-len", p.length)


_SAME = Same("vLLM gives the same results without the options: config.json already contains them.")
_WITHOUT_OPTIONS = {
    "default": _SAME,
    "llama3": _SAME,
    "yarn": Same("vLLM 0.30.0 and later give the same results without the options: config.json already contains them."),
    "linear": "Without the options, vLLM accepts more than {p.length} tokens: it multiplies by the factor again.",
    "longrope": "Without the options, vLLM stops at {p.original_length} tokens.",
}
ENGINE = EngineTable(
    title="vLLM 0.33.0",
    command=_command,
    overrides=_overrides,
    refused=(
        shared.LATENT_ATTENTION,
        shared.PROPORTIONAL_FACTOR,
        shared.DROPS_SECTIONS,
        Case(
            lambda p: p.text_type == "gpt_oss" and p.rope_type != "yarn",
            "its class for gpt_oss computes only yarn. Patch with yarn.",
        ),
        Case(
            lambda p: p.nested and any(parameters.get("truncate") is False for parameters in p.scaled),
            "it reads truncate from each layer type, transformers from the top level. Patch without truncate=false.",
        ),
    ),
    cannot=(
        shared.ONE_DYNAMIC_TABLE,
        Case(
            lambda p: p.has_two_factor_lists,
            "vLLM uses long_factor for every request, also short ones, once --max-model-len is above "
            "{p.original_length}.",
        ),
    ),
    without_options=lambda p: shared.without_options(p, _WITHOUT_OPTIONS),
    notes=(
        shared.FROM_CONFIG,
        Case(
            lambda p: p.rope_type == "longrope" and p.model_type in _INTERLEAVED,
            "vLLM will fail: its longrope does not support the interleaved rotation of {p.model_type}.",
        ),
        Case(
            lambda p: p.tokenizer_length < p.length,
            "tokenizer_config.json has model_max_length {p.tokenizer_length:g}, which vLLM uses as a limit: raise "
            "it to {p.length}.",
        ),
        Case(
            lambda p: bool(p.scaled) and p.draft_layers > 0,
            "To draft with the MTP layers, add --speculative-config "
            """'{{"method": "mtp", "num_speculative_tokens": 1}}'. """
            "The draft reads config.json, not --hf-overrides, and drafts nothing beyond its {p.written_length} tokens.",
        ),
        Case(
            lambda p: p.nested,
            "Per-layer-type parameters were only checked with vLLM's gemma3: compare a long answer with transformers.",
        ),
    ),
)
