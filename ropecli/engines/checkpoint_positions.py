"""A checkpoint's positions as an engine is told them: the written RoPE parameters and the context length."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropecli import demo
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.config.dialects import KEPT_KEYS, MAX_POSITIONS, PARTIAL_KEYS, Parameters, parameters_by_layer_type
from ropecli.config.encoding import native_parameters
from ropecli.config.families import Family
from ropecli.config.fields import first, section_of
from ropecli.errors import PatchError
from ropecli.scaling.longrope import longrope_attention_factor
from ropecli.scaling.spec import ScaledRope

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_SECTIONS = ("mrope_section", "xdrope_section")
_DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class CheckpointPositions:
    """What the engines' tables work from.

    checkpoint: its name on a command line, a folder or a Hub id. on_hub: whether it is a Hub id. revision: of a Hub
    id, None for the default one. section: the part of config.json that holds the RoPE fields, None for all of it.
    parameters: `rope_parameters` with a base each, by layer type (None where all layers share them). rope: the one
    that sees the whole context. length: context length, tokens. written_length: what config.json says of that, under
    length_key. sections: whether multimodal positions share out the pairs. warnings: what config.json leaves open, in
    sentences.
    """

    checkpoint: str
    on_hub: bool
    revision: str | None
    model_type: str
    section: str | None
    parameters: Mapping[str | None, Parameters | None]
    rope: ScaledRope
    length: int
    written_length: int
    length_key: str
    tokenizer_length: float
    sections: bool
    warnings: tuple[str, ...]

    @property
    def nested(self) -> bool:
        """Whether layer types have parameters of their own."""
        return None not in self.parameters

    @property
    def main(self) -> Parameters:
        """The parameters of `rope`."""
        return self.parameters[self.rope.geometry.layer_type] or {}

    @property
    def scaled(self) -> list[Parameters]:
        """Those of all layer types that scale."""
        return [one for one in self.parameters.values() if one and one["rope_type"] != "default"]

    @property
    def rope_type(self) -> str:
        return self.main["rope_type"]

    @property
    def at_revision(self) -> tuple[str, ...]:
        """What follows the checkpoint's name on a command line."""
        return () if self.revision is None else ("--revision", self.revision)

    @property
    def quoted(self) -> str:
        """The checkpoint's name and revision as a shell reads them."""
        return shlex.join([self.checkpoint, *self.at_revision])

    @property
    def original_length(self) -> int:
        """The pretraining length, tokens."""
        return self.rope.geometry.original_max_position_embeddings

    @property
    def factor(self) -> float:
        return float(self.main.get("factor", 1.0))

    @property
    def raised(self) -> bool:
        """Whether config.json says the context length itself."""
        return self.written_length == self.length

    @property
    def has_two_factor_lists(self) -> bool:
        """Whether longrope has one list of factors for short inputs and another for long ones."""
        return self.main.get("short_factor") != self.main.get("long_factor")

    @property
    def usual_longrope_factor(self) -> float:
        """longrope's attention factor by the lengths in config.json, where nothing else says."""
        return longrope_attention_factor(self.written_length / self.original_length, self.original_length)

    def in_section(self, overrides: dict[str, Any]) -> dict[str, Any]:
        """`overrides` at the place of config.json where the RoPE fields are."""
        return overrides if self.section is None else {self.section: overrides}


def read_positions(checkpoint: Checkpoint) -> CheckpointPositions:
    """Raises CheckpointError for a config without rotary embeddings, PatchError for what no engine can be told."""
    section = section_of(checkpoint.config)
    state = read_state(checkpoint)
    ropes, settings, rope, length = state.ropes, state.settings, state.main, state.context_length
    written = parameters_by_layer_type(section, settings.family, [])
    parameters = {
        label: _parameters(ropes[label], own or {}, section, settings.family, length) if label in ropes else None
        for label, own in written.items()
    }
    latent = section.get("qk_rope_head_dim") is not None
    _refuse(checkpoint.name, written, parameters, latent)
    if rope.remapping is not None:
        raise PatchError(
            f"{checkpoint.name} attends by {rope.spec.method}, which no engine has: it would run plain attention. "
            "Load it with transformers, after `import ropecli.attention`."
        )
    tokenizer = (checkpoint.tokenizer_config or {}).get("model_max_length")
    names = settings.family.names_of(MAX_POSITIONS)
    return CheckpointPositions(
        checkpoint=str(demo.FOLDER) if checkpoint.name == demo.NAME else checkpoint.name,
        on_hub=checkpoint.commit is not None,
        revision=None if checkpoint.revision == _DEFAULT_REVISION else checkpoint.revision,
        model_type=str(checkpoint.config.get("model_type")),
        section=None if section is checkpoint.config else "text_config",
        parameters=parameters,
        rope=rope,
        length=length,
        written_length=settings.max_position_embeddings,
        length_key=next((name for name in names if section.get(name) is not None), names[0]),
        tokenizer_length=tokenizer if isinstance(tokenizer, int | float) else math.inf,
        sections=any(key in (one or {}) for one in written.values() for key in _SECTIONS),
        warnings=state.warnings,
    )


def _parameters(
    rope: ScaledRope, written: Parameters, section: dict[str, Any], family: Family, length: int
) -> Parameters:
    """What makes the rope's frequencies, and what config.json has there that is no scaling."""
    kept = {key: value for key, value in written.items() if key in KEPT_KEYS}
    if "max_position_embeddings" in kept:  # a copy that Ministral's config keeps there
        kept["max_position_embeddings"] = length
    head, rotary = rope.geometry.head_dim, rope.geometry.rotary_dim
    if rotary != head:
        kept.setdefault("partial_rotary_factor", first(section, PARTIAL_KEYS) or rotary / head)
    elif rope.geometry.still_pairs:  # native_parameters says which pairs do not rotate
        kept.pop("partial_rotary_factor", None)
    return {**native_parameters(rope, family, length), **kept}


def _refuse(
    name: str,
    written: Mapping[Any, Parameters | None],
    parameters: Mapping[Any, Parameters | None],
    latent: bool,
) -> None:
    if any(one and one.get("mscale_all_dim") for one in written.values()):
        raise PatchError(
            f"{name} carries mscale_all_dim, which also multiplies the softmax scale (DeepSeek). Each engine reads it "
            "from config.json in its own way, and overrides would break that: give the engine the folder alone."
        )
    scaled = {one["rope_type"] for one in parameters.values() if one} - {"default"}
    for rope_type in sorted(scaled - set(_ROPE_TYPES)):
        raise PatchError(
            f"{name} has rope_type {rope_type!r}; what engines do with it was not checked, only with "
            f"{', '.join(_ROPE_TYPES)}. Give the engine the folder alone, and compare a long answer with transformers."
        )
    if latent and scaled:
        raise PatchError(
            f"{name} has multi-head latent attention, for which every engine reads a scaling in a way of its own. "
            "Patch with ntk or abf, which only change the base."
        )
