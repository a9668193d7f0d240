"""The input of engine tables: a checkpoint's positions, and what else its files say."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropecli import demo
from ropecli.checkpoint.lint import faults_in_results, fix_command
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import CheckpointState, Positions, read_state
from ropecli.config.dialects import (
    KEPT_KEYS,
    MAX_POSITIONS,
    MSCALE_PAIR,
    PARTIAL_KEYS,
    THETA_KEYS,
    Parameters,
    parameters_by_layer_type,
)
from ropecli.config.encoding import native_parameters
from ropecli.config.fields import LATENT, first
from ropecli.errors import Finding, PatchError
from ropecli.scaling.longrope import longrope_attention_factor
from ropecli.scaling.spec import ScaledRope

_SECTIONS = ("mrope_section", "xdrope_section")
_DEFAULT_REVISION = "main"


@dataclass(frozen=True)
class EngineInput:
    """Input of the engine tables.

    checkpoint: folder or Hub id, as written on a command line. on_hub: whether it is a Hub id. revision: of the Hub
    id, None for the default. patched: whether the folder has a ropecli.yaml. section: the part of config.json with the
    RoPE fields, None for the top level; text_type: its model_type. parameters: `rope_parameters` including rope_theta,
    by layer type; key None where all layers share them. written_length: the context length in config.json, under
    length_key. sections: whether config.json splits the pairs into sections for multimodal positions. latent: whether
    attention is multi-head latent. older_fields: whether rope_theta and rope_scaling have all that rope_parameters has.
    fix: the command that writes them. findings: those of `inspect` that change what is computed.
    """

    checkpoint: str
    on_hub: bool
    revision: str | None
    model_type: str
    patched: bool
    section: str | None
    text_type: str
    parameters: Mapping[str | None, Parameters | None]
    positions: Positions
    written_length: int
    length_key: str
    tokenizer_length: float
    sections: bool
    latent: bool
    older_fields: bool
    fix: str | None
    findings: tuple[Finding, ...]

    @property
    def rope(self) -> ScaledRope:
        return self.positions.main

    @property
    def length(self) -> int:
        """The context length, tokens."""
        return self.positions.context_length

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
    state = read_state(checkpoint)
    section, family, positions, rope = state.section, state.settings.family, state.positions, state.positions.main
    written = parameters_by_layer_type(section, family, [])
    parameters = {
        label: _parameters(state, positions.ropes[label], fields or {}) if label in positions.ropes else None
        for label, fields in written.items()
    }
    if rope.remapping is not None and not remaps:
        use = "Fine-tune it with `ropecli finetune`." if trains else "Load it with `import ropecli.attention`."
        raise PatchError(
            f"{checkpoint.name} uses {rope.spec.method}, which no engine supports: they would run standard attention. "
            f"{use}"
        )
    scaled = any(value and value["rope_type"] != "default" for value in parameters.values())
    tokenizer = (checkpoint.tokenizer_config or {}).get("model_max_length")
    names = family.names_of(MAX_POSITIONS)
    return EngineInput(
        checkpoint=str(demo.FOLDER) if checkpoint.name == demo.NAME else checkpoint.name,
        on_hub=checkpoint.commit is not None,
        revision=None if checkpoint.revision == _DEFAULT_REVISION else checkpoint.revision,
        model_type=str(checkpoint.config.get("model_type")),
        patched=state.note is not None or state.edited is not None,
        section=None if section is checkpoint.config else "text_config",
        text_type=str(section.get("model_type") or checkpoint.config.get("model_type")),
        parameters=parameters,
        positions=positions,
        written_length=state.max_position_embeddings,
        length_key=next((name for name in names if section.get(name) is not None), names[0]),
        tokenizer_length=tokenizer if isinstance(tokenizer, int | float) else math.inf,
        older_fields=not section.get("rope_parameters")
        or (first(section, THETA_KEYS) is not None and (not scaled or bool(section.get("rope_scaling")))),
        fix=fix_command(state),
        sections=any(key in (fields or {}) for fields in written.values() for key in _SECTIONS),
        latent=section.get(LATENT) is not None,
        findings=faults_in_results(state),
    )


def _parameters(state: CheckpointState, rope: ScaledRope, written: Parameters) -> Parameters:
    """`rope_parameters` of this rope, plus the keys of config.json that are not part of a scaling."""
    family, length = state.settings.family, state.positions.context_length
    kept = {key: value for key, value in written.items() if key in KEPT_KEYS}
    if "max_position_embeddings" in kept:  # Ministral keeps a copy here
        kept["max_position_embeddings"] = length
    head, rotary = rope.geometry.head_dim, rope.geometry.rotary_dim
    if rotary != head:
        kept.setdefault("partial_rotary_factor", first(state.section, PARTIAL_KEYS) or rotary / head)
    elif rope.geometry.still_pairs:  # native_parameters already states which pairs do not rotate
        kept.pop("partial_rotary_factor", None)
    return {**native_parameters(rope, family, length), **kept}
