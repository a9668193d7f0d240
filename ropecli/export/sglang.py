"""SGLang, as its release 0.5.23 reads a config (rotary_embedding/factory.py, hf_transformers/{config,common}.py).

- `--json-model-override-args` is laid over the config; a flat `rope_parameters` is merged into what is there.
- The window: max_position_embeddings, times the factor unless the type is llama3 or
  original_max_position_embeddings is named (yarn, longrope). `--context-length` may not be above that.
- yarn reads attn_factor, on top of 0.1·ln s + 1, and no attention_factor.
- longrope reads no attention_factor but short_mscale and long_mscale; the long list serves whenever any position of
  the batch is beyond the pretraining window.
- dynamic is one table for all lengths, that of the whole window.
- Many model classes hand no scaling to their rotary embedding, only the base.
"""

from ropecli.errors import PatchError
from ropecli.export import wording
from ropecli.export.attention_factor import folder_gives_longropes, with_engine_names
from ropecli.export.engine import Export, command_line, engine, refusal
from ropecli.export.positions import Positions

RELEASE = "0.5.23"
# Types whose class was read and hands rope_parameters on.
_HANDED_ON = {"llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "granite", "gpt_oss", "internlm2"}
# Types whose class was read and hands on the base alone.
_DROPPED = {
    *("baichuan", "chatglm", "dbrx", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gptj"),
    *("granitemoe", "mixtral", "olmo", "persimmon", "phi", "stablelm", "starcoder2", "zaya"),
}


@engine("sglang")
def sglang(positions: Positions) -> Export:
    """`python -m sglang.launch_server` with `--json-model-override-args` and `--context-length`."""
    _refuse(positions)
    # dynamic is worked out from the pretraining window there, as in transformers
    window = positions.original_window if positions.rope_type == "dynamic" else positions.window
    overrides = positions.in_section(
        {"rope_parameters": with_engine_names(positions.main), positions.window_key: window}
    )
    command = command_line(
        *("python", "-m", "sglang.launch_server", "--model-path", positions.checkpoint, *positions.at_revision),
        *("--json-model-override-args", overrides, "--context-length", positions.window),
    )
    return Export("sglang", command, overrides, tuple(_cannot(positions)), tuple(_notes(positions)))


def _refuse(positions: Positions) -> None:
    def cannot(reason: str, next_step: str) -> PatchError:
        return refusal(positions, f"SGLang {RELEASE}", reason, next_step)

    if positions.nested:
        raise cannot(
            "its class for gemma3 takes the base alone from parameters by layer type, and others were not compared.",
            wording.BY_VLLM,
        )
    if positions.rope_type == "default":
        return
    if positions.model_type in _DROPPED:
        raise cannot(
            f"its class for {positions.model_type} reads rope_theta and drops the rest without a word.",
            f"{wording.ANOTHER_BASE}, or serve it with vLLM.",
        )
    if positions.latent:
        raise cannot("its DeepSeek classes read yarn their own way.", f"{wording.ANOTHER_BASE}.")
    if "mrope_section" in positions.main and positions.rope_type != "yarn":
        raise cannot(wording.drops_sections(positions.rope_type), wording.KEEPS_SECTIONS)


def _cannot(positions: Positions) -> list[str]:
    if positions.rope_type == "dynamic":
        return [wording.one_table(positions, "SGLang has one table for all lengths of dynamic NTK")]
    if positions.rope_type == "longrope" and positions.main["short_factor"] != positions.main["long_factor"]:
        return ["SGLang chooses short_factor or long_factor anew for every batch, whatever the cache was made with."]
    return []


def _notes(positions: Positions) -> list[str]:
    notes = [*positions.warnings]
    if positions.model_type not in _HANDED_ON and positions.rope_type != "default":
        notes.append(
            f"SGLang's class for {positions.model_type} was not read: whether it hands rope_parameters to its rotary "
            "embedding is not known. Compare a long answer with transformers before you rely on it."
        )
    if positions.rope_type == "yarn" and "attention_factor" in positions.main:
        notes.append(
            "Without the override SGLang takes 0.1·ln s + 1 for the attention factor: it reads no attention_factor."
        )
    elif positions.rope_type == "longrope" and not folder_gives_longropes(positions):
        notes.append("Without the override SGLang takes an attention factor of its own: it reads no attention_factor.")
    elif positions.rope_type == "linear":
        notes.append(f"Without --context-length SGLang takes {wording.counted_twice(positions)}")
    elif positions.written_window == positions.window or positions.rope_type == "dynamic":
        notes.append("SGLang does the same with the folder alone; the line spells it out.")
    return notes
