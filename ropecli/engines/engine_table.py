"""The form of an engine's table (EngineTable, Case), and what several tables share."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ropecli.config.dialects import Parameters
from ropecli.engines.checkpoint_positions import CheckpointPositions
from ropecli.scaling.yarn import yarn_attention_factor


class Case(NamedTuple):
    """A row of a table: what is said where `holds`. said: a format string, in which p is the CheckpointPositions."""

    holds: Callable[[CheckpointPositions], bool]
    said: str


@dataclass(frozen=True)
class EngineTable:
    """An engine's table.

    title: name and release. command: words of the command, where a mapping stands for its JSON. overrides: as Export
    has them. refused: what it cannot express, each with the next step. cannot, notes: as Export has them. alone: a note
    by rope_type: what it does without the options where config.json says the context length.
    """

    title: str
    command: Callable[[CheckpointPositions], Iterable[object]]
    overrides: Callable[[CheckpointPositions], dict[str, Any]]
    refused: tuple[Case, ...]
    cannot: tuple[Case, ...]
    alone: Mapping[str, str]
    notes: tuple[Case, ...]


DROPS_SECTIONS = Case(
    lambda p: p.sections and p.rope_type not in ("default", "yarn"),
    "under rope_type {p.rope_type!r} it silently drops the sections of multimodal positions. "
    "Patch with yarn, ntk or abf.",
)


def with_engine_names(parameters: Parameters) -> Parameters:
    """`parameters` as vLLM and SGLang read them: the factor a float, the attention factor under their names too.

    longrope: short_mscale and long_mscale, in its place. yarn: attn_factor, on top of 0.1·ln s + 1.
    """
    told, attention_factor = dict(parameters), parameters.get("attention_factor")
    if "factor" in told:
        told["factor"] = float(told["factor"])
    if attention_factor is not None and told["rope_type"] == "longrope":
        told |= {"short_mscale": attention_factor, "long_mscale": attention_factor}
    elif attention_factor is not None and told["rope_type"] == "yarn":
        told["attn_factor"] = attention_factor / yarn_attention_factor(told["factor"])
    return told
