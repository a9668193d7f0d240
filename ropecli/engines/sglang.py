"""SGLang, as its release 0.5.23 reads a config (rotary_embedding/factory.py, hf_transformers/{config,common}.py).

- `--json-model-override-args` is laid over the config; a flat `rope_parameters` is merged into what is there.
- The context length: max_position_embeddings, times the factor unless the type is llama3 or
  original_max_position_embeddings is named (yarn, longrope). `--context-length` may not be above that.
- yarn reads attn_factor, on top of 0.1·ln s + 1, and no attention_factor.
- longrope reads no attention_factor but short_mscale and long_mscale; the long list serves whenever any position of
  the batch is beyond the pretraining length.
- dynamic is one table for all lengths, that of the whole context length.
- Many model classes hand no scaling to their rotary embedding, only the base.
"""

from typing import Any

from ropecli.engines.checkpoint_positions import CheckpointPositions
from ropecli.engines.engine_table import DROPS_SECTIONS, Case, EngineTable, with_engine_names

# Types whose class was read and hands rope_parameters on.
_HANDED_ON = {"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite", "gpt_oss", "internlm2"}
# Types whose class was read and hands on the base alone.
_DROPPED = {
    *("baichuan", "chatglm", "dbrx", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gptj"),
    *("granitemoe", "mixtral", "olmo", "persimmon", "phi", "stablelm", "starcoder2", "zaya"),
}


def _overrides(p: CheckpointPositions) -> dict[str, Any]:
    # dynamic is worked out from the pretraining length there, as in transformers
    length = p.original_length if p.rope_type == "dynamic" else p.length
    return p.in_section({"rope_parameters": with_engine_names(p.main), p.length_key: length})


def _command(p: CheckpointPositions) -> tuple[object, ...]:
    model = ("python", "-m", "sglang.launch_server", "--model-path", p.checkpoint, *p.at_revision)
    return (*model, "--json-model-override-args", _overrides(p), "--context-length", p.length)


_SAME = "SGLang does the same without the options: config.json carries them."
ENGINE = EngineTable(
    title="SGLang 0.5.23",
    command=_command,
    overrides=_overrides,
    refused=(
        Case(
            lambda p: p.nested,
            "its gemma3 takes only the base from parameters by layer type, and other classes were not checked. "
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
        Case(
            lambda p: p.has_two_factor_lists,
            "SGLang chooses short_factor or long_factor anew for every batch, whatever the cache was made with.",
        ),
    ),
    alone={
        "default": _SAME,
        "llama3": _SAME,
        "yarn": "Without the options SGLang ignores attention_factor, and takes 0.1·ln s + 1.",
        "linear": "Without the options SGLang reads on beyond {p.length} tokens: it multiplies by the factor again.",
        "longrope": "Without the options SGLang ignores attention_factor.",
    },
    notes=(
        Case(
            lambda p: bool(p.scaled) and p.model_type not in _HANDED_ON,
            "Whether SGLang's class for {p.model_type} passes rope_parameters to its rotary embedding was not "
            "checked: compare a long answer with transformers first.",
        ),
    ),
)
