"""Renders an engine's table for a checkpoint: a command, and sentences about what the engine does differently."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ropecli.checkpoint.opening import Checkpoint
from ropecli.engines import llama_cpp, sglang, vllm
from ropecli.engines.checkpoint_positions import CheckpointPositions, read_positions
from ropecli.engines.engine_table import Case
from ropecli.errors import MethodError, PatchError, did_you_mean


@dataclass(frozen=True)
class Export:
    """What to tell an engine.

    command: one line to paste. overrides: what the command overrides in the config. cannot: what the engine does
    otherwise than stock transformers, in sentences. notes: what else is worth knowing.
    """

    engine: str
    command: str
    overrides: Mapping[str, Any]
    cannot: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return vars(self)


_ENGINE_NAMES = {"llamacpp": "llama.cpp", "llama-cpp": "llama.cpp"}
ENGINES = {"llama.cpp": llama_cpp.ENGINE, "sglang": sglang.ENGINE, "vllm": vllm.ENGINE}
_ONE_TABLE = Case(
    lambda p: p.rope_type == "dynamic",
    "dynamic NTK has one table of frequencies in engines: every request gets those for {p.length} tokens, where "
    "transformers leaves requests of up to {p.original_length} tokens unscaled.",
)
_NOT_RAISED = (
    "config.json says a context length of {p.written_length} tokens, and the engine stops there without options."
)


def export_checkpoint(checkpoint: Checkpoint, name: str) -> Export:
    """What the engine `name` must be told of the checkpoint's positions.

    Raises MethodError for an unknown engine, PatchError where the engine cannot express the positions.
    """
    if name == "transformers-v4":
        raise MethodError(
            "export no longer has transformers-v4: folders written by `ropecli patch` already carry the fields of "
            "transformers 4. For an unpatched checkpoint, run ropecli patch --method none."
        )
    name = _ENGINE_NAMES.get(name.lower(), name.lower())
    if name not in ENGINES:
        raise MethodError(f"Unknown engine {name!r}. Known: {', '.join(ENGINES)}.{did_you_mean(name, ENGINES)}")
    engine, positions = ENGINES[name], read_positions(checkpoint)
    for reason in _said(engine.refused, positions):
        raise PatchError(f"{engine.title} cannot express the positions of {positions.checkpoint}: {reason}")
    alone = "" if positions.nested else engine.alone.get(positions.rope_type, "")
    alone = alone if positions.raised else _NOT_RAISED
    return Export(
        engine=name,
        command=join_command(*engine.command(positions)),
        overrides=engine.overrides(positions),
        cannot=tuple(_said((_ONE_TABLE, *engine.cannot), positions)),
        notes=(*positions.warnings, *_said((Case(lambda p: bool(alone), alone), *engine.notes), positions)),
    )


def _said(cases: Iterable[Case], positions: CheckpointPositions) -> Iterator[str]:
    return (case.said.format(p=positions) for case in cases if case.holds(positions))


def join_command(*words: object) -> str:
    """Words as a shell reads them; mappings as JSON."""
    return shlex.join(json.dumps(word) if isinstance(word, Mapping) else str(word) for word in words)
