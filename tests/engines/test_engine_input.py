"""What holds for all engines: the revision, the context length, and the refusals."""

import dataclasses

import pytest

from ropecli.engines.engine_export import ENGINES, export_checkpoint
from ropecli.errors import PatchError

WINDOW, TARGET = 256, 1024
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW}
AT_REVISION = {
    "llama.cpp": "hf download someone/model --revision v1 ",
    "sglang": "--model-path someone/model --revision v1 --json",
    "vllm": "vllm serve someone/model --revision v1 --hf-overrides",
    "ollama": "hf download someone/model --revision v1 ",
    "mlx": "hf download someone/model --revision v1`",
    **dict.fromkeys(("axolotl", "llama-factory", "ms-swift", "trl"), "model_revision: v1"),
    "unsloth": "hf download someone/model --revision v1`",
    "lm-eval": '"revision": "v1"',
}
TRAINERS = {name for name, engine in ENGINES.items() if engine.trains}
SERVING = [name for name in ENGINES if name not in {*TRAINERS, "lm-eval"}]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_revision_is_in_the_command_or_a_note(engine, config_only):
    raised = config_only(rope_scaling=YARN, max_position_embeddings=TARGET)  # Ollama reads no further
    on_hub = dataclasses.replace(raised, name="someone/model", revision="v1", commit="0" * 40)
    export = export_checkpoint(on_hub, engine)
    assert AT_REVISION[engine] in "\n".join([export.command, export.file_text, *export.notes])


MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK = {"model_type": "deepseek_v3", "qk_rope_head_dim": 16, "rope_scaling": MSCALE}
KIMI = {"rope_theta": 50000.0, "max_position_embeddings": TARGET, **DEEPSEEK, "model_type": "kimi_k2"}
MINISTRAL = {**MSCALE, "rope_theta": 1e8, "rope_type": "yarn", "llama_4_scaling_beta": 0.1}
GEMMA4 = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
RELEASED = {
    "DeepSeek": {**DEEPSEEK, "max_position_embeddings": TARGET},
    "Kimi-K2.5": {"model_type": "kimi_k25", "text_config": {"hidden_size": 64, "num_attention_heads": 2, **KIMI}},
    "Devstral": {
        "model_type": "mistral3",
        "text_config": {
            **{"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": TARGET},
            **{"model_type": "ministral3", "rope_parameters": MINISTRAL},
        },
    },
    "gemma-3": {
        "model_type": "gemma3",
        "text_config": {
            **{"model_type": "gemma3_text", "max_position_embeddings": 131072, "head_dim": 32},
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
    "gemma-4": {"model_type": "gemma4_text", "rope_parameters": GEMMA4, "max_position_embeddings": TARGET},
}
WITHOUT_OPTIONS = {
    "llama.cpp": "llama-server -m model.gguf -c 1024 -np 1",
    "mlx": "mlx_lm.server --model {0}",
    "ollama": "ollama create my-model -f Modelfile",
    "sglang": "python -m sglang.launch_server --model-path {0} --context-length 1024",
    "vllm": "vllm serve {0} --max-model-len 1024",
}


@pytest.mark.parametrize("engine", SERVING)
@pytest.mark.parametrize("model", RELEASED)
def test_a_released_scaling_that_the_engine_reads_gets_the_plain_command(model, engine, config_only):
    checkpoint = config_only(**{"rope_theta": None, "max_position_embeddings": None, **RELEASED[model]})
    export = export_checkpoint(checkpoint, engine)
    length = "131072" if model == "gemma-3" else "1024"
    assert export.command == WITHOUT_OPTIONS[engine].format(checkpoint.name).replace("1024", length)


LATENT = {"qk_rope_head_dim": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
FACTOR = {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5}
BANDS = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
IN_NEW_FIELDS = {"rope_parameters": {**YARN, "rope_theta": 5e5}, "rope_theta": None}
FILES, SERVERS = ("llama.cpp", "ollama"), ("sglang", "vllm")
REFUSED = [  # engines, rope_scaling, other fields of config.json, part of the message
    (SERVING, LINEAR, LATENT, "multi-head latent"),
    (SERVING, YARN, LATENT, "multi-head latent attention"),
    ((*FILES, *SERVERS), FACTOR, {}, "ignores the factor of rope_type 'proportional'"),
    (SERVERS, {**LINEAR, "mrope_section": [4, 4, 8]}, {}, "silently drops the sections"),
    (("vllm",), LINEAR, {"model_type": "gpt_oss"}, "computes only yarn"),
    (("sglang",), LINEAR, {"model_type": "gemma2"}, "gemma2 reads rope_theta and silently drops"),
    (("llama.cpp",), MSCALE, {}, "do not store it as transformers computes it"),
    (("llama.cpp",), DYNAMIC, {"model_type": "cohere2"}, "do not apply to the sliding-window layers"),
    (("llama.cpp",), {**YARN, "attention_factor": 1.0}, {"model_type": "olmo2"}, "needs --override-kv"),
    (("llama.cpp",), {**YARN, **BANDS}, {"model_type": "qwen2"}, "no flag sets llama3's bands"),
    (("llama.cpp",), {**YARN, "truncate": False}, {}, "rounds the ends of YaRN's ramp"),
    (("ollama",), MSCALE, {}, "does not store all of this yarn scaling"),
    (("ollama",), YARN, {}, f"max_position_embeddings, {WINDOW} tokens; the scaling reaches {TARGET}"),
    (("mlx",), LINEAR, {"model_type": "mixtral"}, "mixtral reads rope_theta and"),
    (("mlx",), DYNAMIC, {}, "another base for each chunk"),
    (("mlx",), {**YARN, "attention_factor": 1.3}, {}, "attention_factor, which is 1.3"),
    (("mlx",), {**YARN, "truncate": False}, {}, "truncate=false"),
    (("mlx",), None, IN_NEW_FIELDS, r"which config.json lacks\. Write them: ropecli patch .* --method yarn"),
    (("axolotl",), DYNAMIC, {}, "raises max_position_embeddings to 512"),
    (("mlx",), None, {"model_type": "qwen3_5_text"}, "no class for qwen3_5_text"),
    (("unsloth",), LINEAR, {"model_type": "gemma2"}, "gemma2 silently drops the scaling"),
    (("unsloth",), YARN, {}, f"by linear where max_seq_length, {TARGET}, is above max_position_embeddings, {WINDOW}"),
    ((*SERVING, "lm-eval"), None, {"architectures": ["LlamaForCausalLMEagle3"]}, "drafts tokens for another model"),
]


@pytest.mark.parametrize(("engines", "scaling", "fields", "message"), REFUSED)
def test_a_scaling_that_an_engine_reads_differently_is_refused(engines, scaling, fields, message, config_only):
    for engine in engines:
        with pytest.raises(PatchError, match=message):
            export_checkpoint(config_only(head_dim=32, rope_scaling=scaling, **fields), engine)


STORED = {"none", "linear", "ntk", "yarn", "llama3"}


def test_ollama_refuses_what_a_gguf_does_not_store(patch, patched):
    checkpoint = patched(patch).checkpoint
    if patch in STORED:
        export = export_checkpoint(checkpoint, "ollama")
        assert export.file_text == f"FROM ./model.gguf\nPARAMETER num_ctx {TARGET}\n"
        assert export.command == "ollama create my-model -f Modelfile"
        assert "convert_hf_to_gguf.py" in export.notes[0]
    else:
        with pytest.raises(PatchError, match=r"does not store all of this .* Patch with linear, ntk, abf, or yarn"):
            export_checkpoint(checkpoint, "ollama")


@pytest.mark.parametrize(("engine", "message"), [("sglang", "gemma3"), ("llama.cpp", "flags apply to all layers")])
def test_engines_that_do_not_tell_layers_apart_refuse_scaled_sliding_ones(engine, message, patched_model):
    with pytest.raises(PatchError, match=message):
        export_checkpoint(patched_model("gemma3_text", "yarn", ["sliding_attention"]), engine)


@pytest.mark.transformers("5.20", "gemma3 saves null for a layer type without layers")
def test_vllm_gets_the_scaling_of_each_layer_type(patched_model):
    export = export_checkpoint(patched_model("gemma3_text", "linear", ["sliding_attention"]), "vllm")
    parameters = export.overrides["rope_parameters"]
    assert {label: (fields["rope_type"], fields["rope_theta"]) for label, fields in parameters.items()} == {
        "sliding_attention": ("linear", 10000.0),
        "full_attention": ("default", 1000000.0),
    }
    assert any("only checked with vLLM's gemma3" in note for note in export.notes)
