"""The rotary tables of a live transformers model: found, read, set. One place knows how they are named there."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ropecli.errors import PatchError
from ropecli.rope import ScaledRope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TABLE = "inv_freq"


@dataclass(frozen=True)
class RotaryTable:
    """One `inv_freq` buffer. name: of its module in the model. layer_type: None where all layers share one."""

    name: str
    module: Any
    layer_type: str | None

    @property
    def _prefix(self) -> str:
        return f"{self.layer_type}_" if self.layer_type else ""

    @property
    def inv_freq(self) -> np.ndarray:
        """Shape (rotary_dim/2,), float64, radians per token."""
        return getattr(self.module, self._prefix + _TABLE).detach().double().cpu().numpy()

    @property
    def attention_factor(self) -> float:
        shared = getattr(self.module, "attention_scaling", 1.0)
        return float(getattr(self.module, f"{self._prefix}attention_scaling", shared))

    @property
    def rope_type(self) -> str:
        kind = getattr(self.module, "rope_type", "default")
        return str(kind.get(self.layer_type, "default") if isinstance(kind, dict) else kind)

    def at_length(self, length: int) -> tuple[np.ndarray, float]:
        """(inv_freq, attention factor) after a fresh pass over `length` tokens, as stock transformers makes them."""
        reset_tables([self])
        arguments = {"layer_type": self.layer_type} if self.layer_type else {}
        last_position = torch.tensor([[length - 1]], device=getattr(self.module, self._prefix + _TABLE).device)
        self.module(torch.zeros(1, 1, 1, device=last_position.device), last_position, **arguments)
        return self.inv_freq, self.attention_factor

    def set(self, rope: ScaledRope) -> None:
        """Makes the module turn as `rope` says, at every length. Raises PatchError where the shapes differ."""
        buffer = getattr(self.module, self._prefix + _TABLE)
        if tuple(buffer.shape) != rope.inv_freq.shape:
            raise PatchError(f"{self.name} has {tuple(buffer.shape)} frequencies, the patch {rope.inv_freq.shape}.")
        values = torch.from_numpy(rope.inv_freq.copy()).to(device=buffer.device, dtype=torch.float32)
        setattr(self.module, self._prefix + _TABLE, values)
        setattr(self.module, f"{self._prefix}attention_scaling", rope.attention_factor)
        # "default" keeps transformers from computing the table again by its own rule
        kind = getattr(self.module, "rope_type", "default")
        self.module.rope_type = {**kind, self.layer_type: "default"} if isinstance(kind, dict) else "default"


def rotary_tables(model: "PreTrainedModel") -> list[RotaryTable]:
    """Every rotary table of the text decoder. Raises PatchError where there is none."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    # some types take their head for the decoder
    tables = (list(_find(decoder)) if decoder is not None else []) or list(_find(model))
    if not tables:
        raise PatchError("The live model has no rotary table (inv_freq): its positions are not driven by the config.")
    return tables


def set_ropes(tables: list[RotaryTable], ropes: dict[str | None, ScaledRope]) -> None:
    """Patches a live model in memory. Raises PatchError for a table of a layer type that has no rope."""
    for table in tables:
        if table.layer_type not in ropes:
            raise PatchError(f"{table.name}: the live model has layers of type {table.layer_type!r}; config.json not.")
        table.set(ropes[table.layer_type])


@contextlib.contextmanager
def restored(tables: list[RotaryTable]) -> Iterator[None]:
    """At the end, every table is again as it was at the beginning."""
    modules = {id(table.module): table.module for table in tables}.values()
    before = [(module, {**module.__dict__, "_buffers": dict(module._buffers)}) for module in modules]
    try:
        yield
    finally:
        for module, state in before:
            module.__dict__.clear()
            module.__dict__.update(state)


def reset_tables(tables: list[RotaryTable]) -> None:
    """Makes every table anew from its config: the dynamic ones remember the longest length they have seen."""
    for module in {id(table.module): table.module for table in tables}.values():
        fresh = type(module)(module.config).to(next(module.buffers()).device)
        # the module stays itself, but of what it remembers nothing does: some of it lies in attributes of its own
        module.__dict__.clear()
        module.__dict__.update(fresh.__dict__)


def switches_with_length(tables: list[RotaryTable], window: int) -> bool:
    """Whether a pass over `window` tokens uses other frequencies than a short one. Leaves the tables fresh."""
    switching = False
    for table in tables:
        if table.rope_type in ("dynamic", "longrope"):
            short, long = table.at_length(1)[0], table.at_length(window)[0]
            switching = switching or not np.array_equal(short, long)
    if any(table.rope_type in ("dynamic", "longrope") for table in tables):
        reset_tables(tables)
    return switching


def _find(model: torch.nn.Module) -> Iterator[RotaryTable]:
    for name, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            if key.endswith(_TABLE) and "original" not in key and not key.startswith("long_"):
                yield RotaryTable(name, module, key[: -len(_TABLE)].rstrip("_") or None)
