"""The structure of an engine table (EngineTable, Case), and the parts that several tables share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ropecli.config.dialects import Parameters
from ropecli.engines.engine_input import EngineInput
from ropecli.scaling.yarn import yarn_attention_factor

# Types with multi-head latent attention whose classes do not treat every scaling as DeepSeek's yarn.
_LATENT_AS_OTHERS = {"minicpm3"}
_NOT_RAISED = (
    "config.json states a context length of {p.written_length} tokens. Without the options, the engine stops there."
)


class Case(NamedTuple):
    """A sentence and its condition. text: a format string, in which p is the EngineInput."""

    holds: Callable[[EngineInput], bool]
    text: str


class Same(str):
    """Says that an engine gives the same results without its options. Not said beside findings that change results."""


@dataclass(frozen=True)
class EngineTable:
    """An engine's table.

    title: name and release. command: words of the command; a mapping becomes JSON. overrides, cannot, notes: see
    Export; a note without a condition is a format string alone. refused: unsupported positions, each with the next
    step. without_options: a sentence on what the engine does without the options, or nothing. file_name: the config
    file that the command reads, named by its last word. file_text: its contents, from `overrides`. trains: whether it
    trains, with transformers' models, which read all of config.json. remaps: whether it runs distance methods.
    """

    title: str
    command: Callable[[EngineInput], Iterable[object]]
    overrides: Callable[[EngineInput], dict[str, Any]]
    notes: tuple[Case | str, ...]
    refused: tuple[Case, ...] = ()
    cannot: tuple[Case, ...] = ()
    without_options: Callable[[EngineInput], str] = lambda p: ""
    file_name: str = ""
    file_text: Callable[[dict[str, Any]], str] = lambda overrides: ""
    trains: bool = False
    remaps: bool = False


ONE_DYNAMIC_TABLE = Case(
    lambda p: p.rope_type == "dynamic",
    "Engines compute dynamic NTK once: every request gets the frequencies for {p.length} tokens. "
    "transformers leaves requests of up to {p.original_length} tokens unscaled.",
)
DROPS_SECTIONS = Case(
    lambda p: p.sections and p.rope_type not in ("default", "yarn"),
    "with rope_type {p.rope_type!r} it silently drops the sections of multimodal positions. "
    "Patch with yarn, ntk or abf.",
)
LATENT_ATTENTION = Case(
    lambda p: (
        p.latent
        and bool(p.scaled)
        and not p.scales_softmax
        and p.text_type not in _LATENT_AS_OTHERS
        and (p.patched or p.text_type != "deepseek_v4")  # has classes of its own, for its config.json as released
    ),
    "with multi-head latent attention it reads a scaling without mscale_all_dim differently from transformers. Patch "
    "with ntk or abf, which only change the base.",
)
PROPORTIONAL_FACTOR = Case(
    lambda p: p.rope_type == "proportional" and p.factor != 1,
    "it ignores the factor of rope_type 'proportional'. Patch with ntk or abf, which only change the base.",
)


def is_released_gpt_oss(p: EngineInput) -> bool:
    """Return whether these are gpt-oss' own positions: YaRN without rounding the ends of its ramp."""
    return p.text_type == "gpt_oss" and not p.patched and p.main.get("truncate") is False


ROUNDS_GPT_OSS = Case(
    is_released_gpt_oss,
    "The engine rounds the ends of YaRN's ramp, gpt-oss does not (truncate=false): nine of its 32 pairs rotate at "
    "another speed than in transformers, one of them 1.8 times as fast. vLLM and SGLang do not round.",
)
FROM_CONFIG = Case(
    lambda p: p.only_in_config,
    "The command has no RoPE options: they would replace a part of what the engine reads from config.json.",
)


def without_options(p: EngineInput, texts: Mapping[str, str]) -> str:
    """A note on the engine without its options. texts: by rope_type, where config.json states the context length."""
    if p.only_in_config:
        return ""
    if not p.raised:
        return _NOT_RAISED
    text = texts.get(p.rope_type, "")
    return "" if p.nested or (p.findings and isinstance(text, Same)) else text


def with_engine_names(parameters: Parameters) -> Parameters:
    """`parameters` as vLLM and SGLang read them: the factor a float, the attention factor also under their names.

    longrope: short_mscale and long_mscale replace it. yarn: attn_factor multiplies 0.1·ln s + 1.
    """
    renamed, attention_factor = dict(parameters), parameters.get("attention_factor")
    if "factor" in renamed:
        renamed["factor"] = float(renamed["factor"])
    if attention_factor is not None and renamed["rope_type"] == "longrope":
        renamed |= {"short_mscale": attention_factor, "long_mscale": attention_factor}
    elif attention_factor is not None and renamed["rope_type"] == "yarn":
        renamed["attn_factor"] = attention_factor / yarn_attention_factor(renamed["factor"])
    return renamed
