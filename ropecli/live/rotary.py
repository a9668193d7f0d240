"""The rotary tables of a live transformers model: found, read, set. One place knows how they are named there."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ropecli.config.families import family_of
from ropecli.errors import PatchError
from ropecli.scaling.scale import scale, varies_with_length
from ropecli.scaling.spec import ScaledRope

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TABLE = "inv_freq"
_HOOK = "_ropecli_follows_length"
_CHANGED_IN_PLACE = ("_buffers", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
"""Attributes of a module that hold its buffers and hooks."""


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
        self._cos_sin(length - 1)
        return self.inv_freq, self.attention_factor

    def _cos_sin(self, position: int) -> Any:
        """The cos and sin of one token at `position`, in whichever form the module returns them."""
        arguments = {"layer_type": self.layer_type} if self.layer_type else {}
        positions = torch.tensor([[position]], device=getattr(self.module, self._prefix + _TABLE).device)
        return self.module(torch.zeros(1, 1, 1, device=positions.device), positions, **arguments)

    @torch.no_grad()
    def refuse_if_computed(self) -> None:
        """Raises PatchError for a module that ignores its table and computes its frequencies in each pass."""
        buffer = getattr(self.module, self._prefix + _TABLE)
        given = []
        for value in (0.0, 1.0):
            setattr(self.module, self._prefix + _TABLE, torch.full_like(buffer, value))
            given.append(self._cos_sin(1))
        setattr(self.module, self._prefix + _TABLE, buffer)
        if all(torch.equal(*pair) for pair in zip(*map(_tensors, given), strict=True)):
            raise PatchError(
                f"{self.name} computes its frequencies again in each pass, and cannot be patched in memory. "
                "Write the patch to a folder instead."
            )

    def set(self, rope: ScaledRope) -> None:
        """Makes the module rotate as `rope` says, at every length. Raises PatchError where the shapes differ."""
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


def set_ropes(tables: list[RotaryTable], ropes: Mapping[str | None, ScaledRope]) -> None:
    """Makes every table rotate as its layer type's rope says, at all lengths.

    Raises PatchError for a table of a layer type that has no rope.
    """
    for table in tables:
        if table.layer_type not in ropes:
            raise PatchError(f"{table.name}: the live model has layers of type {table.layer_type!r}; config.json not.")
        table.set(ropes[table.layer_type])


def turn_by(model: "PreTrainedModel", ropes: Mapping[str | None, ScaledRope]) -> None:
    """Makes the rotary tables of a model rotate by the ropes of a plan, see live_patch. Raises PatchError."""
    tables = rotary_tables(model)
    _refuse_softmax_scale(tables, ropes)
    for module in _modules(tables):
        if (hook := module.__dict__.pop(_HOOK, None)) is not None:
            hook.remove()
    set_ropes(tables, ropes)
    for table in tables:
        table.refuse_if_computed()
    for module in _modules(tables):
        own = [table for table in tables if table.module is module and varies_with_length(ropes[table.layer_type])]
        if own:
            module.__dict__[_HOOK] = module.register_forward_pre_hook(_follow(own, ropes), with_kwargs=True)


def _refuse_softmax_scale(tables: list[RotaryTable], ropes: Mapping[str | None, ScaledRope]) -> None:
    """DeepSeek's attention took its softmax scale from the config when the model was built, and keeps it."""
    configs = [table.module.config for table in tables]
    if not any(family_of({"model_type": config.model_type}).reads_mscale_all_dim for config in configs):
        return
    shipped = [getattr(config, "rope_parameters", None) or {} for config in configs]
    wanted = [rope.spec.params for rope in ropes.values()]
    if any(parameters.get("mscale_all_dim") for parameters in [*shipped, *wanted]):
        raise PatchError(
            "mscale_all_dim sets this model's softmax scale when it is built, which a patch in memory does not reach. "
            "Write the patch to a folder instead, and load that."
        )


def _follow(tables: list[RotaryTable], ropes: Mapping[str | None, ScaledRope]) -> Callable[..., None]:
    """A hook that sets the tables for the largest position of the pass that begins."""

    def before_pass(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        positions = named["position_ids"] if "position_ids" in named else arguments[1]
        length = int(positions.max()) + 1
        own = [(table.layer_type, ropes[table.layer_type]) for table in tables]
        set_ropes(tables, {label: scale(rope.geometry, rope.spec, length) for label, rope in own})

    return before_pass


def _tensors(given: Any) -> tuple[torch.Tensor, ...]:
    return (given,) if isinstance(given, torch.Tensor) else tuple(given)


def unpatched_after(model: "PreTrainedModel") -> contextlib.ExitStack:
    """At the end of the `with` block, the model's rotary tables and its attention are as they were before it."""
    undo = contextlib.ExitStack()
    for owner in [*_modules(rotary_tables(model)), *_configs(model.config)]:
        before = {key: copy.copy(value) if key in _CHANGED_IN_PLACE else value for key, value in vars(owner).items()}
        undo.callback(_set_attributes, owner, before)
    return undo


def _set_attributes(owner: Any, attributes: Mapping[str, Any]) -> None:
    owner.__dict__.clear()
    owner.__dict__.update(attributes)


def _configs(config: Any) -> list[Any]:
    """A config and those of its parts; each names an attention implementation of its own."""
    parts = [part for key in config.sub_configs if (part := getattr(config, key, None)) is not None]
    return [config, *(one for part in parts for one in _configs(part))]


def reset_tables(tables: list[RotaryTable]) -> None:
    """Makes every table again from its config: dynamic ones remember the longest length they have seen."""
    for module in _modules(tables):
        _remake(module, next(module.buffers()).device)


def remake_rotary_modules(model: "PreTrainedModel") -> None:
    """Gives a model that was built without storage its rotary modules, on the CPU. Raises PatchError for none."""
    for module in _modules(rotary_tables(model)):
        _remake(module, torch.device("cpu"))


def _remake(module: Any, device: torch.device) -> None:
    fresh = type(module)(module.config).to(device)
    # all attributes, since some types keep the longest length under a name of their own
    _set_attributes(module, fresh.__dict__)


def switches_with_length(tables: list[RotaryTable], longest: int) -> bool:
    """Whether a pass over `longest` tokens uses other frequencies than a short one. Leaves the tables fresh."""
    switching = False
    for table in tables:
        if table.rope_type in ("dynamic", "longrope"):
            short, long = table.at_length(1)[0], table.at_length(longest)[0]
            switching = switching or not np.array_equal(short, long)
    if any(table.rope_type in ("dynamic", "longrope") for table in tables):
        reset_tables(tables)
    return switching


def follows_length(model: "PreTrainedModel", longest: int) -> bool:
    """Whether the model's own rotary tables, if it has any, differ between a short pass and one over `longest` tokens.

    Leaves them fresh.
    """
    with contextlib.suppress(PatchError):  # no rotary tables at all
        return switches_with_length(rotary_tables(model), longest)
    return False


def _modules(tables: list[RotaryTable]) -> list[Any]:
    """The modules of the tables, each once: layer types may share one."""
    return list({id(table.module): table.module for table in tables}.values())


def _find(model: torch.nn.Module) -> Iterator[RotaryTable]:
    for name, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            if key.endswith(_TABLE) and "original" not in key and not key.startswith("long_"):
                yield RotaryTable(name, module, key[: -len(_TABLE)].rstrip("_") or None)
