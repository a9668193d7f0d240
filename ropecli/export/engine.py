"""Finds the engines and asks one of them: Export, the registry, export_checkpoint."""

import importlib
import json
import pkgutil
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ropecli.checkpoint.reading import Checkpoint
from ropecli.errors import MethodError, PatchError, did_you_mean
from ropecli.export.positions import Positions, read_positions


@dataclass(frozen=True)
class Export:
    """What to tell an engine.

    command: one line to paste. overrides: what it says in place of the config, as JSON would have it. cannot: what
    the engine does otherwise than stock transformers, in sentences. notes: what else is worth knowing.
    """

    engine: str
    command: str
    overrides: Mapping[str, Any]
    cannot: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_ENGINES: dict[str, Callable[[Positions], Export]] = {}


def engine(name: str) -> Callable:
    """Registers the decorated function as the one that speaks to an engine."""

    def register(function: Callable[[Positions], Export]) -> Callable[[Positions], Export]:
        _ENGINES[name] = function
        return function

    return register


@cache
def engines() -> dict[str, Callable[[Positions], Export]]:
    """All engines by name."""
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")
    return dict(sorted(_ENGINES.items()))


def export_checkpoint(checkpoint: Checkpoint, name: str) -> Export:
    """What the engine `name` has to be told of the checkpoint's positions.

    Raises MethodError for an unknown engine, PatchError where the engine cannot express the positions.
    """
    known = engines()
    if name not in known:
        raise MethodError(f"Unknown engine {name!r}. Known: {', '.join(known)}.{did_you_mean(name, known)}")
    return known[name](read_positions(checkpoint))


def refusal(positions: Positions, name: str, reason: str, next_step: str) -> PatchError:
    """The error for positions that the engine cannot express; the caller raises it."""
    return PatchError(f"{name} cannot express the positions of {positions.checkpoint}: {reason} {next_step}")


def command_line(*words: object) -> str:
    """Words as a shell takes them back; mappings as JSON."""
    return shlex.join(json.dumps(word) if isinstance(word, Mapping) else str(word) for word in words)


def number(value: float) -> str:
    """As short as a float32 or float64 reader gives the value back: 4, 0.878, 1000000."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
