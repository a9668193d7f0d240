"""Renders an engine's table for a checkpoint: the launch command, and how the engine differs from transformers."""

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
    """Result of `ropecli export`.

    command: one line to paste. overrides: the config values that the command overrides. cannot: sentences on how the
    engine differs from stock transformers. notes: further remarks.
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
    "Engines compute dynamic NTK once: every request gets the frequencies for {p.length} tokens. "
    "transformers leaves requests of up to {p.original_length} tokens unscaled.",
)
_NOT_RAISED = (
    "config.json states a context length of {p.written_length} tokens. Without the options, the engine stops there."
)


def export_checkpoint(checkpoint: Checkpoint, name: str) -> Export:
    """Build the launch command of engine `name` for this checkpoint.

    Raises MethodError for an unknown engine, PatchError where the engine does not support the checkpoint's positions.
    """
    if name == "transformers-v4":
        raise MethodError(
            "export no longer supports transformers-v4: folders written by `ropecli patch` already contain the fields "
            "of transformers 4. For an unpatched checkpoint, run `ropecli patch --method none`."
        )
    name = _ENGINE_NAMES.get(name.lower(), name.lower())
    if name not in ENGINES:
        raise MethodError(f"Unknown engine {name!r}. Known: {', '.join(ENGINES)}.{did_you_mean(name, ENGINES)}")
    engine, positions = ENGINES[name], read_positions(checkpoint)
    for reason in _texts(engine.refused, positions):
        raise PatchError(f"{engine.title} does not support the positions of {positions.checkpoint}: {reason}")
    without_options = "" if positions.nested else engine.without_options.get(positions.rope_type, "")
    without_options = without_options if positions.raised else _NOT_RAISED
    notes = (Case(lambda p: bool(without_options), without_options), *engine.notes)
    return Export(
        engine=name,
        command=join_command(*engine.command(positions)),
        overrides=engine.overrides(positions),
        cannot=tuple(_texts((_ONE_TABLE, *engine.cannot), positions)),
        notes=(*positions.warnings, *_texts(notes, positions)),
    )


def _texts(cases: Iterable[Case], positions: CheckpointPositions) -> Iterator[str]:
    return (case.text.format(p=positions) for case in cases if case.holds(positions))


def join_command(*words: object) -> str:
    """Join words into a shell command; mappings become JSON."""
    return shlex.join(json.dumps(word) if isinstance(word, Mapping) else str(word) for word in words)
