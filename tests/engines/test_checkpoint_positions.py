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


def test_llama_cpp_converts_a_local_folder(config_only):
    said = all_said(on_hub(config_only(rope_scaling=YARN), "main"), "llama.cpp")
    assert "hf download someone/model prints" in said
    assert "convert_hf_to_gguf.py DIR " in said


@pytest.mark.parametrize("engine", SERVING)
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"qk_rope_head_dim": 16, "rope_scaling": {"type": "linear", "factor": 2.0}}, "multi-head latent attention"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}}, "the softmax scale"),
        (
            {"rope_scaling": {"type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "'proportional'; engine support was only checked for",
        ),
    ],
    ids=["latent", "mscale", "unknown"],
)
def test_what_no_engine_can_be_told_is_refused(fields, said, engine, config_only):
    with pytest.raises(PatchError, match=said):
        export_checkpoint(config_only(**fields), engine)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_sections_of_multimodal_positions_are_not_dropped(engine, config_only):
    scaling = {"type": "linear", "factor": 2.0, "mrope_section": [4, 4, 8]}
    with pytest.raises(PatchError, match="silently drops the sections"):
        export_checkpoint(config_only(rope_scaling=scaling), engine)


@pytest.mark.parametrize("engine", ["llama.cpp", "sglang", "vllm"])
def test_one_table_for_all_lengths_is_named(engine, patched):
    said = export_checkpoint(patched("dynamic").checkpoint, engine).cannot[0]
    assert f"for {TARGET} tokens" in said
    assert f"up to {WINDOW} tokens unscaled" in said


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
