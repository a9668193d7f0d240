"""vLLM, as its release 0.33.0 reads a config (rotary_embedding/__init__.py, config/model.py).

- `--hf-overrides` sets `rope_parameters` whole, after everything else was read: base, type and partial share must
  be in it. A factor must be a float there: linear takes a whole number for a list.
- The context length: max_position_embeddings, for linear and dynamic times the factor even where that was raised
  already; for longrope the top-level original_max_position_embeddings unless --max-model-len says more.
- yarn reads attention_factor since 0.30.0; before, attn_factor on top of 0.1·ln s + 1.
- longrope reads no attention_factor but short_mscale and long_mscale.
- dynamic is one table for all lengths, from max_trained_positions and max_position_embeddings.
"""

from typing import Any

from ropecli.config.dialects import Parameters
from ropecli.engines.checkpoint_positions import CheckpointPositions
from ropecli.engines.engine_table import DROPS_SECTIONS, Case, EngineTable, with_engine_names

_INTERLEAVED = ("cohere", "cohere2", "ernie4_5", "glm", "glm4", "helium")


def _overrides(p: CheckpointPositions) -> dict[str, Any]:
    told: dict[Any, Any] = {label: one and _told(one, p) for label, one in p.parameters.items()}
    return p.in_section({"rope_parameters": told if p.nested else told[None] or {}, p.length_key: p.length})


def _told(parameters: Parameters, p: CheckpointPositions) -> Parameters:
    told = with_engine_names(parameters)
    if told["rope_type"] == "dynamic":
        told["max_trained_positions"] = p.original_length
    return told


def _command(p: CheckpointPositions) -> tuple[object, ...]:
    model = ("vllm", "serve", p.checkpoint, *p.at_revision)
    return (*model, "--hf-overrides", _overrides(p), "--max-model-len", p.length)


_SAME = "vLLM does the same without the options: config.json carries them."
ENGINE = EngineTable(
    title="vLLM 0.33.0",
    command=_command,
    overrides=_overrides,
    refused=(
        DROPS_SECTIONS,
        Case(
            lambda p: p.nested and any(one.get("truncate") is False for one in p.scaled),
            "it reads truncate inside each layer type, and transformers beside them. Patch without truncate=false.",
        ),
    ),
    cannot=(
        Case(
            lambda p: p.has_two_factor_lists,
            "vLLM uses long_factor for every request, short ones too, once --max-model-len is above "
            "{p.original_length}.",
        ),
    ),
    alone={
        "default": _SAME,
        "llama3": _SAME,
        "yarn": "vLLM 0.30.0 and later do the same without the options: config.json carries them.",
        "linear": "Without the options vLLM reads on beyond {p.length} tokens: it multiplies by the factor again.",
        "longrope": "Without the options vLLM stops at {p.original_length} tokens and ignores attention_factor.",
    },
    notes=(
        Case(
            lambda p: p.rope_type == "longrope" and p.model_type in _INTERLEAVED,
            "vLLM stops here: its longrope does not support the interleaved rotation of {p.model_type}.",
        ),
        Case(
            lambda p: p.tokenizer_length < p.length,
            "tokenizer_config.json says model_max_length {p.tokenizer_length:g}, which vLLM takes for a limit: raise "
            "it to {p.length}.",
        ),
        Case(
            lambda p: p.nested,
            "Parameters by layer type were checked in vLLM's gemma3 alone: compare a long answer with transformers.",
        ),
    ),
)
