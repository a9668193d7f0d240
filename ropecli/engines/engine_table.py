"""The structure of an engine table: its input, read from a checkpoint, and its cases, some shared by several tables."""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ropecli import demo
from ropecli.checkpoint.hub import DEFAULT_REVISION
from ropecli.checkpoint.lint import faults_in_results, fix_command
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import CheckpointState, read_state
from ropecli.config.dialects import MAX_POSITIONS, MSCALE_PAIR, THETA_KEYS, Parameters
from ropecli.config.encoding import written_parameters
from ropecli.config.fields import LATENT, draft_layers, first, is_drafter
from ropecli.config.findings import Finding
from ropecli.errors import PatchError
from ropecli.scaling.longrope import longrope_attention_factor
from ropecli.scaling.spec import ScaledRope
from ropecli.scaling.yarn import yarn_attention_factor

_SECTIONS = ("mrope_section", "xdrope_section")
# Types with multi-head latent attention whose classes do not treat every scaling as DeepSeek's yarn.
_LATENT_AS_OTHERS = {"minicpm3"}
_NOT_RAISED = "Without the options, the engine stops at {p.written_length} tokens, the context length in config.json."


@dataclass(frozen=True)
class EngineInput:
    """Input of the engine tables.

    checkpoint: folder or Hub id, as written on a command line. revision: of the Hub id, None for the default. patched:
    whether the folder has a ropecli.yaml. section: the part of config.json with the RoPE fields, None for the top
    level; text_type: its model_type. parameters: `rope_parameters` including rope_theta, by layer type; key None where
    all layers share them. written_length: the context length in config.json, under length_key. draft_layers: for
    multi-token prediction. older_fields: whether rope_theta and rope_scaling have all that rope_parameters has. fix:
    the command that writes them. findings: those of `inspect` that change what is computed.
    """

    state: CheckpointState
    checkpoint: str
    revision: str | None
    model_type: str
    patched: bool
    section: str | None
    text_type: str
    parameters: Mapping[str | None, Parameters | None]
    written_length: int
    length_key: str
    tokenizer_length: float
    draft_layers: int
    older_fields: bool
    fix: str | None
    findings: tuple[Finding, ...]

    @property
    def rope(self) -> ScaledRope:
        return self.state.positions.main

    @property
    def length(self) -> int:
        """The context length, tokens."""
        return self.state.positions.context_length

    @property
    def original_length(self) -> int:
        """The pretraining length that an engine reads, tokens; the makers' may be another."""
        return self.rope.geometry.original_max_position_embeddings

    @property
    def nested(self) -> bool:
        """Whether parameters differ by layer type."""
        return None not in self.parameters

    @property
    def main(self) -> Parameters:
        """The parameters of `rope`."""
        return self.parameters[self.rope.geometry.layer_type] or {}

    @property
    def scaled(self) -> list[Parameters]:
        """The parameters of every layer type with a scaling."""
        by_type = self.parameters.values()
        return [parameters for parameters in by_type if parameters and parameters["rope_type"] != "default"]

    @property
    def only_main_scaled(self) -> bool:
        """Whether no layer type but that of `rope` has a scaling."""
        return all(parameters is self.main for parameters in self.scaled)

    @property
    def scales_softmax(self) -> bool:
        """Whether yarn has mscale_all_dim, by which DeepSeek's classes also multiply the softmax scale."""
        return bool(self.main.get(MSCALE_PAIR[1]))

    @property
    def only_in_config(self) -> bool:
        """Whether overrides would replace a part of what the engine reads from config.json."""
        return self.scales_softmax or self.rope_type == "proportional" or (self.nested and not self.patched)

    @property
    def rope_type(self) -> str:
        return self.main["rope_type"]

    @property
    def at_revision(self) -> tuple[str, ...]:
        return () if self.revision is None else ("--revision", self.revision)

    @property
    def quoted(self) -> str:
        """The checkpoint's name and revision, quoted for a shell."""
        return shlex.join([self.checkpoint, *self.at_revision])

    @property
    def factor(self) -> float:
        return float(self.main.get("factor", 1.0))

    @property
    def raised(self) -> bool:
        """Whether max_position_embeddings already is the context length."""
        return self.written_length == self.length

    @property
    def has_two_factor_lists(self) -> bool:
        """Whether longrope's short_factor and long_factor differ."""
        return self.main.get("short_factor") != self.main.get("long_factor")

    @property
    def usual_longrope_factor(self) -> float:
        """longrope's default attention factor, from the lengths in config.json."""
        return longrope_attention_factor(self.written_length / self.original_length, self.original_length)

    def in_section(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """Nest `overrides` under the config section that holds the RoPE fields."""
        return overrides if self.section is None else {self.section: overrides}


def read_input(checkpoint: Checkpoint, *, trains: bool = False, remaps: bool = False) -> EngineInput:
    """Read the input of a checkpoint. trains: for a trainer, which runs transformers' own models. remaps: also
    for a distance method.

    Raises CheckpointError for a config without rotary embeddings, PatchError for positions that no engine supports.
    """
    if is_drafter(checkpoint.config) and not trains:
        raise PatchError(
            f"{checkpoint.name} drafts tokens for another model. Export that one, and give this folder to the engine "
            "as its draft model."
        )
    state = read_state(checkpoint)
    section, positions, rope = state.section, state.positions, state.positions.main
    parameters = {
        label: written_parameters(section, state.settings, positions.ropes[label], positions.context_length)
        if label in positions.ropes
        else None
        for label in state.settings.parameters
    }
    if rope.remapping is not None and not remaps:
        use = "Fine-tune it with `ropecli finetune`." if trains else "Load it with `import ropecli.attention`."
        raise PatchError(
            f"{checkpoint.name} uses {rope.spec.method}, which no engine supports: they would run standard attention. "
            f"{use}"
        )
    scaled = any(value and value["rope_type"] != "default" for value in parameters.values())
    tokenizer = (checkpoint.tokenizer_config or {}).get("model_max_length")
    names = state.settings.family.names_of(MAX_POSITIONS)
    return EngineInput(
        state=state,
        checkpoint=str(demo.FOLDER) if checkpoint.name == demo.NAME else checkpoint.name,
        revision=None if checkpoint.revision == DEFAULT_REVISION else checkpoint.revision,
        model_type=str(checkpoint.config.get("model_type")),
        patched=state.note is not None or state.edited is not None,
        section=None if section is checkpoint.config else "text_config",
        text_type=str(section.get("model_type") or checkpoint.config.get("model_type")),
        parameters=parameters,
        written_length=state.settings.max_position_embeddings,
        length_key=next((name for name in names if section.get(name) is not None), names[0]),
        tokenizer_length=tokenizer if isinstance(tokenizer, int | float) else math.inf,
        older_fields=not section.get("rope_parameters")
        or (first(section, THETA_KEYS) is not None and (not scaled or bool(section.get("rope_scaling")))),
        fix=fix_command(state),
        draft_layers=draft_layers(section),
        findings=faults_in_results(state),
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
    lambda p: (
        any(key in (fields or {}) for fields in p.state.settings.parameters.values() for key in _SECTIONS)
        and p.rope_type not in ("default", "yarn")
    ),
    "with rope_type {p.rope_type!r} it silently drops the sections of multimodal positions. "
    "Patch with yarn, ntk or abf.",
)
LATENT_ATTENTION = Case(
    lambda p: (
        p.state.section.get(LATENT) is not None
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
    """`parameters` as vLLM and SGLang read them: the factor a float, since vLLM's linear takes an integer for a list.

    Both ignore the attention_factor of longrope and read short_mscale and long_mscale. Of yarn, SGLang and vLLM before
    0.30.0 read attn_factor, which multiplies 0.1·ln s + 1.
    """
    renamed, attention_factor = dict(parameters), parameters.get("attention_factor")
    if "factor" in renamed:
        renamed["factor"] = float(renamed["factor"])
    if attention_factor is not None and renamed["rope_type"] == "longrope":
        renamed |= {"short_mscale": attention_factor, "long_mscale": attention_factor}
    elif attention_factor is not None and renamed["rope_type"] == "yarn":
        renamed["attn_factor"] = attention_factor / yarn_attention_factor(renamed["factor"])
    return renamed
