"""What holds for all engines: the revision, the context length, and the refusals."""

import contextlib
import dataclasses

import numpy as np
import pytest

from ropecli.checkpoint.state import read_state
from ropecli.engines.engine_export import ENGINES, export_checkpoint
from ropecli.errors import PatchError
from ropecli.scaling.yarn import by_parts

WINDOW, TARGET = 256, 1024
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": WINDOW}
AT_REVISION = {
    "llama.cpp": "hf download someone/model --revision v1 ",
    "sglang": "--model-path someone/model --revision v1 --json",
    "vllm": "vllm serve someone/model --revision v1 --hf-overrides",
    "ollama": "hf download someone/model --revision v1 ",
    "mlx": "hf download someone/model --revision v1`",
    "trl": "model_revision: v1",
    "axolotl": "model_revision: v1",
}
TRAINERS = {name for name, engine in ENGINES.items() if engine.trains}
SERVING = [name for name in ENGINES if name not in TRAINERS]


def on_hub(checkpoint, revision: str):
    return dataclasses.replace(checkpoint, name="someone/model", revision=revision, commit="0" * 40)


def all_said(checkpoint, engine: str) -> str:
    export = export_checkpoint(checkpoint, engine)
    return "\n".join([export.command, export.file_text, *export.notes])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_revision_is_handed_on(engine, config_only):
    raised = config_only(rope_scaling=YARN, max_position_embeddings=TARGET)  # Ollama reads no further
    assert AT_REVISION[engine] in all_said(on_hub(raised, "v1"), engine)


MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
SECTIONS = {"type": "linear", "factor": 2.0, "mrope_section": [4, 4, 8]}
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


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_only_the_length_is_overridden_where_config_json_does_not_state_it(engine, config_only):
    export = export_checkpoint(config_only(**DEEPSEEK), engine)
    assert export.overrides == {"max_position_embeddings": TARGET}


@pytest.mark.parametrize(("model_type", "engines"), [("gpt_oss", ["llama.cpp", "ollama", "mlx"]), ("llama", [])])
def test_gpt_oss_is_served_although_engines_round_its_ramp(model_type, engines, config_only):
    """Released without rounding, and served so by all; in other checkpoints, truncate=false is refused."""
    scaling = {**YARN, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
    fields = {"model_type": model_type, "head_dim": 64, "rope_theta": 150000, "max_position_embeddings": 131072}
    checkpoint, served = config_only(**fields, rope_scaling=scaling), []
    for engine in ("llama.cpp", "ollama", "mlx"):
        with contextlib.suppress(PatchError):
            said = export_checkpoint(checkpoint, engine).cannot[0]
            assert "nine of its 32 pairs" in said
            served.append(engine)
    assert served == engines
    rope = read_state(checkpoint).main
    faster = by_parts(rope.geometry, 32.0, 32.0, 1.0, True) / rope.inv_freq
    assert np.sum(np.abs(faster - 1) > 1e-6) == 9
    assert faster.max() == pytest.approx(1.8, abs=0.05)


@pytest.mark.parametrize(
    ("fields", "said", "engines"),
    [
        ({"qk_rope_head_dim": 16, "rope_scaling": {"type": "linear", "factor": 2.0}}, "multi-head latent", SERVING),
        ({"qk_rope_head_dim": 16, "rope_scaling": YARN}, "multi-head latent attention", SERVING),
        ({"rope_scaling": MSCALE}, "do not store it as transformers computes it", ["llama.cpp"]),
        ({"rope_scaling": MSCALE}, "does not store all of this yarn scaling", ["ollama"]),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "ignores the factor of rope_type 'proportional'",
            ["llama.cpp", "ollama", "sglang", "vllm"],
        ),
        ({"rope_scaling": SECTIONS}, "silently drops the sections", ["sglang", "vllm"]),
    ],
    ids=["latent", "latent, without mscale", "mscale", "mscale in Ollama", "factor", "sections"],
)
def test_what_an_engine_reads_differently_is_refused(fields, said, engines, config_only):
    for engine in engines:
        with pytest.raises(PatchError, match=said):
            export_checkpoint(config_only(**fields), engine)


@pytest.mark.parametrize(("engine", "said"), [("sglang", "gemma3"), ("llama.cpp", "flags apply to all layers")])
def test_engines_that_do_not_tell_layers_apart_refuse_scaled_sliding_ones(engine, said, patched_model):
    with pytest.raises(PatchError, match=said):
        export_checkpoint(patched_model("gemma3_text", "yarn", ["sliding_attention"]), engine)


@pytest.mark.transformers("5.20", "gemma3 saves null for a layer type without layers")
def test_vllm_is_told_which_layers_are_scaled(patched_model):
    export = export_checkpoint(patched_model("gemma3_text", "linear", ["sliding_attention"]), "vllm")
    told = export.overrides["rope_parameters"]
    assert {label: (one["rope_type"], one["rope_theta"]) for label, one in told.items()} == {
        "sliding_attention": ("linear", 10000.0),
        "full_attention": ("default", 1000000.0),
    }
    assert any("only checked with vLLM's gemma3" in note for note in export.notes)
