"""Options for SGLang, checked in release 0.5.23 (rotary_embedding/factory.py, hf_transformers/{config,common}.py).

- `--json-model-override-args` overrides config values; a flat `rope_parameters` is merged into the existing one.
- Context length: max_position_embeddings, multiplied by the factor unless the type is llama3 or
  original_max_position_embeddings is set (yarn, longrope). `--context-length` cannot exceed it.
- yarn ignores attention_factor and reads attn_factor, which multiplies 0.1·ln s + 1.
- longrope ignores attention_factor and reads short_mscale and long_mscale. It uses the long list when any position of
  the batch is beyond the pretraining length.
- dynamic uses one table, for the full context length.
- Many model classes pass only the base to their rotary embedding, not the scaling.
"""

from typing import Any

from ropecli.engines.checkpoint_positions import CheckpointPositions
from ropecli.engines.engine_table import DROPS_SECTIONS, ONE_DYNAMIC_TABLE, Case, EngineTable, with_engine_names

# model_type of classes that pass rope_parameters on, checked in the source.
_PASSED_ON = {"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite", "gpt_oss", "internlm2"}
# model_type of classes that pass on only the base, checked in the source.
_DROPPED = {
    *("baichuan", "chatglm", "dbrx", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gptj"),
    *("granitemoe", "mixtral", "olmo", "persimmon", "phi", "stablelm", "starcoder2", "zaya"),
}


def _overrides(p: CheckpointPositions) -> dict[str, Any]:
    # SGLang computes dynamic from the pretraining length, as transformers does
    length = p.original_length if p.rope_type == "dynamic" else p.length
    return p.in_section({"rope_parameters": with_engine_names(p.main), p.length_key: length})


def _command(p: CheckpointPositions) -> tuple[object, ...]:
    model = ("python", "-m", "sglang.launch_server", "--model-path", p.checkpoint, *p.at_revision)
    return (*model, "--json-model-override-args", _overrides(p), "--context-length", p.length)


_SAME = "SGLang gives the same results without the options: config.json already contains them."
ENGINE = EngineTable(
    title="SGLang 0.5.23",
    command=_command,
    overrides=_overrides,
    refused=(
        Case(
            lambda p: p.nested,
            "its gemma3 reads only the base from per-layer-type parameters, and other classes were not checked. "
            "Serve the folder with vLLM.",
        ),
        Case(
            lambda p: bool(p.scaled) and p.model_type in _DROPPED,
            "its class for {p.model_type} reads rope_theta and silently drops the scaling. Serve the folder with "
            "vLLM, or patch with ntk or abf, which only change the base.",
        ),
        DROPS_SECTIONS,
    ),
    cannot=(
        ONE_DYNAMIC_TABLE,
        Case(
            lambda p: p.has_two_factor_lists,
            "SGLang chooses short_factor or long_factor for each batch, even if the KV cache holds the other.",
        ),
    ),
    without_options={
        "default": _SAME,
        "llama3": _SAME,
        "yarn": "Without the options, SGLang ignores attention_factor and uses 0.1·ln s + 1.",
        "linear": "Without the options, SGLang accepts more than {p.length} tokens: it multiplies by the factor again.",
        "longrope": "Without the options, SGLang ignores attention_factor.",
    },
    notes=(
        Case(
            lambda p: bool(p.scaled) and p.model_type not in _PASSED_ON,
            "SGLang's class for {p.model_type} was not checked: it may ignore rope_parameters. Compare a long answer "
            "with transformers first.",
        ),
    ),
)
