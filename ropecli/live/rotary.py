"""Find, read and set the rotary tables of a live transformers model. Only this file knows their names there."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from ropecli.config.families import family_of
from ropecli.errors import PatchError, ProofError, reason_of
from ropecli.scaling.spec import ScaledRope, scale, varies_with_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FOLLOWS_LENGTH = ("dynamic", "longrope")
"""rope_types whose tables may depend on the length."""
_TABLE = "inv_freq"
_SECTIONS = "mrope_section"
_HOOK = "_ropecli_follows_length"
_CHANGED_IN_PLACE = ("_buffers", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
"""Attributes of a module that hold its buffers and hooks."""


@dataclass(frozen=True)
class RotaryTable:
    """One `inv_freq` buffer. name: name of its module in the model. layer_type: None if all layers share one table."""

    name: str
    module: Any
    layer_type: str | None

    @property
    def _prefix(self) -> str:
        return f"{self.layer_type}_" if self.layer_type else ""

    @property
    def buffer(self) -> torch.Tensor:
        """Shape (rotary_dim/2,), radians per token."""
        return getattr(self.module, self._prefix + _TABLE)

    @property
    def inv_freq(self) -> np.ndarray:
        """As float64."""
        return self.buffer.detach().cpu().double().numpy()

    @property
    def attention_factor(self) -> float:
        shared = getattr(self.module, "attention_scaling", 1.0)
        return float(getattr(self.module, f"{self._prefix}attention_scaling", shared))

    @property
    def rope_type(self) -> str:
        kind = getattr(self.module, "rope_type", "default")
        return str(kind.get(self.layer_type, "default") if isinstance(kind, dict) else kind)

    def at_length(self, length: int) -> tuple[np.ndarray, float]:
        """(inv_freq, attention factor) in a pass over `length` tokens, computed by the module.

        If frequencies follow the length, ask in ascending order from a length within the pretraining length on, which
        resets dynamic NTK.
        """
        cos_sin = torch.stack([part.abs().cpu().double().flatten() for part in tensors_of(self._cos_sin(length - 1))])
        applied = float(cos_sin.norm(dim=0).max())  # phimoe applies another factor than its attribute, which is exact
        exact = math.isclose(applied, self.attention_factor, rel_tol=1e-6)
        return self.inv_freq, self.attention_factor if exact else applied

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Rotate by other frequencies in the `with` block. Not for tables that follow the length."""
        name, before = self._prefix + _TABLE, self.buffer
        setattr(self.module, name, before * 0.5 + 0.01)
        try:
            yield
        finally:
            setattr(self.module, name, before)

    @property
    def axes(self) -> int:
        """Number of positions per token: 1; with mrope, one per section (time, height and width)."""
        sections = getattr(self.module, _SECTIONS, None)
        sections = sections.get(self.layer_type) if isinstance(sections, dict) else sections
        return len(sections) if sections else 1

    def angles_at(self, *positions: int) -> np.ndarray:
        """cos, then sin, of a token with one position per axis, computed by the module.

        Shape (2, rotary_dim), or (2, rotary_dim/2) of modules that give each pair once. See at_length for the order.
        """
        given = tensors_of(self._cos_sin(torch.tensor(positions).reshape(-1, 1, 1)))
        parts = (given[0].real, given[0].imag) if given[0].is_complex() else given
        # in transformers 5.5 Qwen2-VL has a row per axis, which its attention combines
        return torch.stack([part[0].flatten().cpu().double() for part in parts]).numpy()

    def _cos_sin(self, position: int | torch.Tensor) -> Any:
        """The cos and sin of one token at `position`, in the form that the module returns. Raises PatchError."""
        arguments = {"layer_type": self.layer_type} if self.layer_type else {}
        device = self.buffer.device
        positions = torch.tensor([[position]]) if isinstance(position, int) else position
        try:
            return self.module(torch.zeros(1, 1, 1, device=device), positions.to(device), **arguments)
        except (RuntimeError, TypeError) as error:  # mrope sections that do not fit the head, for example
            raise PatchError(f"{self.name} cannot rotate with this config: {reason_of(error)}.") from error

    @torch.no_grad()
    def refuse_if_computed(self) -> None:
        """Raise PatchError if the module ignores its table and computes its frequencies in each pass."""
        before = self._cos_sin(1)
        with self.changed():
            after = self._cos_sin(1)
        if all(torch.equal(*pair) for pair in zip(*map(tensors_of, (before, after)), strict=True)):
            raise PatchError(
                f"{self.name} computes its frequencies again in each pass, so it cannot be patched in memory. "
                "Write the patch to a folder instead."
            )

    def rope_in(self, ropes: Mapping[str | None, ScaledRope]) -> ScaledRope:
        """The rope of the table's layer type. Raises ProofError if there is none."""
        if self.layer_type not in ropes:
            what = f"the live model has layers of type {self.layer_type!r}, but config.json does not"
            raise ProofError(f"{self.name}: {what}.")
        return ropes[self.layer_type]

    def set(self, rope: ScaledRope) -> None:
        """Set the module's table to `rope`, for every length."""
        values = torch.from_numpy(rope.inv_freq.copy()).to(device=self.buffer.device, dtype=torch.float32)
        setattr(self.module, self._prefix + _TABLE, values)
        setattr(self.module, f"{self._prefix}attention_scaling", rope.attention_factor)
        # "default" prevents transformers from computing the table again
        kind = getattr(self.module, "rope_type", "default")
        self.module.rope_type = {**kind, self.layer_type: "default"} if isinstance(kind, dict) else "default"


def rotary_tables(model: "PreTrainedModel") -> list[RotaryTable]:
    """Find the rotary tables of the text model, without those of vision and audio. Raises PatchError for none."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    # some model types return their LM head from get_decoder
    tables = (list(_find(decoder)) if decoder is not None else []) or list(_find(model))
    text = model.config.get_text_config()
    if text is not model.config:
        tables = [table for table in tables if type(getattr(table.module, "config", text)) is type(text)]
    if not tables:
        raise PatchError("The live model has no rotary table (inv_freq), so a patch would have no effect on it.")
    return tables


def rotate_by(model: "PreTrainedModel", ropes: Mapping[str | None, ScaledRope]) -> None:
    """Set the rotary tables of a model to the ropes of a plan, see live_patch. Raises PatchError."""
    tables = rotary_tables(model)
    _refuse_softmax_scale(tables, ropes)
    for module in modules_of(tables):
        if (hook := module.__dict__.pop(_HOOK, None)) is not None:
            hook.remove()
    for table in tables:
        table.set(table.rope_in(ropes))
        table.refuse_if_computed()
    for module in modules_of(tables):
        varying = [table for table in tables if table.module is module and varies_with_length(ropes[table.layer_type])]
        if varying:
            module.__dict__[_HOOK] = on_positions(module, _follow(varying, ropes))


def _refuse_softmax_scale(tables: list[RotaryTable], ropes: Mapping[str | None, ScaledRope]) -> None:
    """Refuse mscale_all_dim: DeepSeek's attention reads its softmax scale from the config only when it is built."""
    configs = [table.module.config for table in tables]
    shipped = [getattr(config, "rope_parameters", None) or {} for config in configs]
    set_by = [*shipped, *(rope.spec.params for rope in ropes.values())]
    if any(family_of({"model_type": config.model_type}).reads_mscale_all_dim for config in configs) and any(
        parameters.get("mscale_all_dim") for parameters in set_by
    ):
        raise PatchError(
            "mscale_all_dim sets this model's softmax scale when it is built, so it cannot be patched in memory. "
            "Write the patch to a folder and load that."
        )


def _follow(
    tables: list[RotaryTable], ropes: Mapping[str | None, ScaledRope]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """For `on_positions`: set the tables for the largest position."""

    def follow(positions: torch.Tensor) -> torch.Tensor:
        length = int(positions.max()) + 1
        for table in tables:
            rope = ropes[table.layer_type]
            table.set(scale(rope.geometry, rope.spec, length))
        return positions

    return follow


def on_positions(module: torch.nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> RemovableHandle:
    """Change the positions that a rotary module receives in each pass."""

    def before_pass(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if "position_ids" in named:
            return arguments, {**named, "position_ids": change(named["position_ids"])}
        return (arguments[0], change(arguments[1]), *arguments[2:]), named

    return module.register_forward_pre_hook(before_pass, with_kwargs=True)


def tensors_of(output: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that a rotary module returns: cos and sin, or one complex tensor."""
    return (output,) if isinstance(output, torch.Tensor) else tuple(output)


def unpatched_after(model: "PreTrainedModel") -> contextlib.ExitStack:
    """Restore the model's rotary tables and attention at the end of the `with` block."""
    undo = contextlib.ExitStack()
    for owner in [*modules_of(rotary_tables(model)), *_configs(model.config)]:
        before = {key: copy.copy(value) if key in _CHANGED_IN_PLACE else value for key, value in vars(owner).items()}
        undo.callback(_set_attributes, owner, before)
    return undo


def _set_attributes(owner: Any, attributes: Mapping[str, Any]) -> None:
    owner.__dict__.clear()
    owner.__dict__.update(attributes)


def _configs(config: Any) -> list[Any]:
    """A config and its sub-configs; each has its own attention implementation."""
    parts = [part for key in config.sub_configs if (part := getattr(config, key, None)) is not None]
    return [config, *(nested for part in parts for nested in _configs(part))]


def reset_tables(tables: list[RotaryTable], device: str | None = None) -> None:
    """Recreate the rotary modules from their config. Dynamic tables depend on the longest length seen so far.

    device: default: the device of each module.
    """
    for module in modules_of(tables):
        hook = getattr(module, "_hf_hook", None)
        # all attributes, because some model types store the longest length under another name
        _set_attributes(module, type(module)(module.config).to(device or next(module.buffers()).device).__dict__)
        if hook is not None:  # of a model spread over devices
            from accelerate.hooks import add_hook_to_module

            add_hook_to_module(module, hook)


def varying_tables(model: "PreTrainedModel", longest: int) -> list[RotaryTable]:
    """The model's rotary tables if a pass over `longest` tokens uses other frequencies than a short one; else none.

    Resets them.
    """
    tables: list[RotaryTable] = []
    with contextlib.suppress(PatchError):  # no rotary tables at all
        tables = rotary_tables(model)
    varying = [table for table in tables if table.rope_type in FOLLOWS_LENGTH]
    switching = any(not np.array_equal(table.at_length(1)[0], table.at_length(longest)[0]) for table in varying)
    reset_tables(varying)
    return tables if switching else []


def modules_of(tables: list[RotaryTable]) -> list[Any]:
    """The distinct modules of the tables; layer types may share one."""
    return list({id(table.module): table.module for table in tables}.values())


def _find(model: torch.nn.Module) -> Iterator[RotaryTable]:
    for name, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            if key.endswith(_TABLE) and "original" not in key and not key.startswith("long_"):
                yield RotaryTable(name, module, key[: -len(_TABLE)].rstrip("_") or None)
