"""vLLM, as its release 0.33.0 reads a config (rotary_embedding/__init__.py, config/model.py).

- `--hf-overrides` sets `rope_parameters` whole, after everything else was read: base, type and partial share must
  be in it. A factor must be a float there: linear takes a whole number for a list.
- The window: max_position_embeddings, for linear and dynamic times the factor even where that was raised already;
  for longrope the top-level original_max_position_embeddings unless --max-model-len says more.
- yarn reads attention_factor since 0.30.0; before, attn_factor on top of 0.1·ln s + 1.
- longrope reads no attention_factor but short_mscale and long_mscale.
- dynamic is one table for all lengths, since 0.22.0 from max_trained_positions and max_position_embeddings.
- DeepSeek's classes turn every type but default into a YaRN of their own.
"""

from typing import Any

from ropecli.checkpoint.dialects import Parameters
from ropecli.errors import PatchError
from ropecli.export import wording
from ropecli.export.attention_factor import folder_gives_longropes, with_engine_names
from ropecli.export.engine import Export, command_line, engine, refusal
from ropecli.export.positions import Positions

RELEASE = "0.33.0"
_SECTIONS = ("mrope_section", "xdrope_section")
_INTERLEAVED = ("cohere", "cohere2", "ernie4_5", "glm", "glm4", "helium")
_HONOURED_AS_WRITTEN = ("default", "llama3", "yarn")


@engine("vllm")
def vllm(positions: Positions) -> Export:
    """`vllm serve` with `--hf-overrides` and `--max-model-len`."""
    _refuse(positions)
    overrides = positions.in_section(
        {"rope_parameters": _rope_parameters(positions), positions.window_key: positions.window}
    )
    command = command_line(*_serve(positions), "--hf-overrides", overrides, "--max-model-len", positions.window)
    return Export("vllm", command, overrides, tuple(_cannot(positions)), tuple(_notes(positions)))


def _serve(positions: Positions) -> tuple[str, ...]:
    return ("vllm", "serve", positions.checkpoint, *positions.at_revision)


def _refuse(positions: Positions) -> None:
    def cannot(reason: str, next_step: str) -> PatchError:
        return refusal(positions, f"vLLM {RELEASE}", reason, next_step)

    for parameters in positions.scaled:
        rope_type = parameters["rope_type"]
        if positions.latent:
            raise cannot(
                f"its DeepSeek classes turn rope_type {rope_type!r} into a YaRN of their own, with another softmax "
                "scale.",
                f"{wording.ANOTHER_BASE}.",
            )
        if rope_type != "yarn" and any(key in positions.written for key in _SECTIONS):
            raise cannot(wording.drops_sections(rope_type), wording.KEEPS_SECTIONS)
        if positions.nested and parameters.get("truncate") is False:
            raise cannot(
                "truncate is read inside each layer type there, and transformers reads it beside them.",
                "Patch without truncate=false.",
            )


def _rope_parameters(positions: Positions) -> dict[Any, Any]:
    told = {label: one and _told(one, positions) for label, one in positions.parameters.items()}
    return told if positions.nested else told[None] or {}


def _told(parameters: Parameters, positions: Positions) -> Parameters:
    told = with_engine_names(parameters)
    if told["rope_type"] == "dynamic":
        told["max_trained_positions"] = positions.original_window
    return told


def _cannot(positions: Positions) -> list[str]:
    if any(one["rope_type"] == "dynamic" for one in positions.scaled):
        return [wording.one_table(positions, "vLLM has one table for all lengths of dynamic NTK")]
    if any(one["rope_type"] == "longrope" and one["short_factor"] != one["long_factor"] for one in positions.scaled):
        return [
            f"vLLM takes long_factor for every request once --max-model-len is above {positions.original_window}, "
            "short requests too."
        ]
    return []


def _notes(positions: Positions) -> list[str]:
    notes = [*positions.warnings, _alone(positions)]
    if any(one["rope_type"] == "yarn" and "attention_factor" in one for one in positions.scaled):
        notes.append("attn_factor tells releases before 0.30.0 what attention_factor tells the later ones.")
    if positions.rope_type == "dynamic":
        notes.append("Releases before 0.22.0 want dynamic as config.json has it, without these overrides.")
    if positions.rope_type == "longrope" and positions.model_type in _INTERLEAVED:
        notes.append(f"vLLM's longrope knows no rotation of neighbours, as {positions.model_type} has it, and stops.")
    if positions.tokenizer_window is not None and positions.tokenizer_window < positions.window:
        notes.append(
            f"tokenizer_config.json says model_max_length {positions.tokenizer_window:g}, which vLLM takes for a "
            f"limit: raise it to {positions.window}."
        )
    if positions.nested:
        notes.append("Parameters for each layer type were read in vLLM's gemma3; other classes were not compared.")
    return notes


def _alone(positions: Positions) -> str:
    """What `vllm serve` does with the folder alone."""
    serve = f"`{command_line(*_serve(positions))}` alone"
    as_written = positions.written_window == positions.window
    if any(one["rope_type"] not in _HONOURED_AS_WRITTEN for one in positions.others):
        return f"What {serve} does with the layers that see a part of the context was not read: keep to the line."
    if positions.rope_type in _HONOURED_AS_WRITTEN and as_written:
        since = ", from 0.30.0 on" if any("attention_factor" in one for one in positions.scaled) else ""
        return f"{serve} does the same{since}: config.json carries it all. The line spells it out."
    if positions.rope_type == "linear" and as_written:
        return f"{serve} has the same frequencies but takes {wording.counted_twice(positions)}"
    if positions.rope_type == "longrope" and as_written:
        another = "" if folder_gives_longropes(positions) else ", and with another attention factor"
        return f"{serve} stops at {positions.original_window} tokens{another}."
    if positions.rope_type == "dynamic":
        return f"{serve} does not scale at all, and has no frequencies beyond {positions.original_window} tokens."
    return f"{serve} stops at {positions.written_window} tokens."
