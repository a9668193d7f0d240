"""Options for SGLang, checked in release 0.5.23 (rotary_embedding/factory.py, hf_transformers/{config,common}.py).

- `--json-model-override-args` overrides config values; a flat `rope_parameters` is merged into the existing one.
- Context length: max_position_embeddings, multiplied by the factor unless the type is llama3 or
  original_max_position_embeddings is set (yarn, longrope). `--context-length` cannot exceed it.
- longrope uses the long list when any position of the batch is beyond the pretraining length.
- Classes with multi-head latent attention compute DeepSeek's yarn, with mscale and mscale_all_dim, for every scaling.
- Of parameters by layer type, gemma3 reads those of full attention and the base of sliding layers; gemma4 reads base,
  rope_type and partial_rotary_factor; deepseek_v4 reads the fields as released.
- qwen3_5 reads yarn with the sections of multimodal positions.
- A draft gets the same overrides, also one in a folder of its own (ModelConfig.from_server_args).
"""

from typing import Any

from ropecli.engines import engine_table as shared
from ropecli.engines.engine_table import Case, EngineInput, EngineTable, Same

# model_type of classes that pass rope_parameters on, checked in the source.
_PASSED_ON = {
    *("deepseek_v2", "deepseek_v3", "exaone", "exaone4", "gemma3_text", "gemma4_text", "gpt_oss", "granite"),
    *("internlm2", "kimi_k2", "llama", "llama4_text", "minicpm3", "ministral3", "mistral", "nemotron-nas", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
}
# model_type of classes that read parameters by layer type -> rope_type of the layers that see the whole context.
_BY_LAYER_TYPE = {"gemma3_text": ("default", "linear", "yarn"), "gemma4_text": ("default", "proportional")}
# model_type of classes that pass on only the base, checked in the source.
_DROPPED = {
    *("baichuan", "chatglm", "dbrx", "gemma", "gemma2", "gptj", "granitemoe", "mixtral", "olmo", "persimmon", "phi"),
    *("stablelm", "starcoder2", "zaya"),
}


def _overrides(p: EngineInput) -> dict[str, Any]:
    if p.only_in_config or p.nested:
        return {} if p.raised else p.in_section({p.length_key: p.length})
    if _in_text_config(p):
        return {}
    # SGLang computes dynamic from the pretraining length, as transformers does
    length = p.original_length if p.rope_type == "dynamic" else p.length
    return p.in_section({"rope_parameters": shared.with_engine_names(p.main), p.length_key: length})


def _command(p: EngineInput) -> tuple[object, ...]:
    overrides = _overrides(p)
    options = ("--json-model-override-args", overrides) if overrides else ()
    model = ("python", "-m", "sglang.launch_server", "--model-path", p.checkpoint, *p.at_revision)
    return (*model, *options, "--context-length", p.length)


def _reads_layer_types(p: EngineInput) -> bool:
    """Whether SGLang's class reads parameters by layer type as transformers does."""
    if not p.patched and (not p.scaled or p.text_type == "deepseek_v4"):
        return True
    return p.only_main_scaled and p.rope_type in _BY_LAYER_TYPE.get(p.text_type, ())


def _in_text_config(p: EngineInput) -> bool:
    """Whether config.json suffices, and an override would be of text_config, at which SGLang crashes (issue 27974)."""
    return p.section is not None and isinstance(_by_config_alone(p), Same)


def _without_options(p: EngineInput) -> str:
    if _in_text_config(p):
        return "SGLang reads the scaling from config.json. Overrides within text_config crash it (sglang 27974)."
    return _by_config_alone(p)


def _by_config_alone(p: EngineInput) -> str:
    same = Same("SGLang gives the same results without the options: config.json already contains them.")
    ignores = "Without the options, SGLang ignores attention_factor and uses 0.1·ln s + 1."
    linear = "Without the options, SGLang accepts more than {p.length} tokens: it multiplies by the factor again."
    texts = {
        "default": same,
        "llama3": same,
        "yarn": ignores if "attention_factor" in p.main else same,
        "linear": linear,
        "longrope": same if p.patched else "Without the options, SGLang ignores attention_factor.",
    }
    return shared.without_options(p, texts)


ENGINE = EngineTable(
    title="SGLang 0.5.23",
    command=_command,
    overrides=_overrides,
    refused=(
        shared.LATENT_ATTENTION,
        shared.PROPORTIONAL_FACTOR,
        Case(
            lambda p: p.nested and not _reads_layer_types(p),
            "of classes with parameters by layer type, those for gemma3 and gemma4 read a scaling of full attention "
            "layers only, and others were not checked. Serve the folder with vLLM.",
        ),
        Case(
            lambda p: bool(p.scaled) and p.model_type in _DROPPED,
            "its class for {p.model_type} reads rope_theta and silently drops the scaling. Serve the folder with "
            "vLLM, or patch with ntk or abf, which only change the base.",
        ),
        shared.DROPS_SECTIONS,
    ),
    cannot=(
        shared.ONE_DYNAMIC_TABLE,
        Case(
            lambda p: p.has_two_factor_lists,
            "SGLang chooses short_factor or long_factor for each batch, even if the KV cache holds the other.",
        ),
    ),
    without_options=_without_options,
    notes=(
        shared.FROM_CONFIG,
        Case(
            lambda p: bool(p.scaled) and p.draft_layers > 0,
            "To draft with the MTP layers, add --speculative-algorithm NEXTN. The draft gets the same options.",
        ),
        Case(
            lambda p: bool(p.scaled) and p.text_type not in _PASSED_ON,
            "SGLang's class for {p.model_type} was not checked: it may ignore rope_parameters. Compare a long answer "
            "with transformers first.",
        ),
    ),
)
