"""Check that a loaded model computes the scaling of its checkpoint's files, whatever wrapped or patched it.

Tables: every rotary table, and the cos and sin that its module computes, as in the proof of a patch. Attention: one
pass over a few tokens whose positions reach the context length. Each attention module also runs with transformers' own
code, imported a second time: both must give the same queries and keys, from the cos and sin of the rotary module.
"""

import contextlib
import importlib.util
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ropecli.attention.head_layout import (
    ALLOWED,
    AttentionRecorder,
    attending_by,
    change_positions,
    difference,
    layer_label,
)
from ropecli.checkpoint.opening import Checkpoint, open_checkpoint
from ropecli.checkpoint.state import Positions, read_state
from ropecli.config.changes import diff
from ropecli.errors import CheckpointError, PatchError, ProofError, reason_of, shown
from ropecli.live.devices import probe_ids
from ropecli.live.proof import compare, prove_reading
from ropecli.live.rotary import RotaryTable, modules_of, rotary_tables, tensors_of, unpatched_after
from ropecli.live.stock_transformers import read_stock_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SIDES = ("in the loaded model", "by the checkpoint's files")
_FIELDS = ("rope_parameters", "max_position_embeddings")
_TOKENS = 12
_STOCK = "transformers.models."


@dataclass(frozen=True)
class LoadedCheck:
    """Result of `check_loaded`.

    tables, layers: rotary tables and attention modules that compute what the files say. differences: sentences on those
    that do not, with the likely cause. unproved: sentences on what could not be compared.
    """

    tables: int
    layers: int = 0
    differences: tuple[str, ...] = ()
    unproved: tuple[str, ...] = ()


def check_loaded(model: nn.Module, checkpoint: str | Path | Checkpoint, *, strict: bool = True) -> LoadedCheck:
    """Check that a model that a script or trainer has loaded computes the scaling of a checkpoint's files.

    model: a transformers model, also in PEFT, DDP, FSDP2 or torch.compile; if it is sharded, all processes
    call this. It is left as it was. checkpoint: a folder, a Hub id or `demo`; its weights are not read. strict: raise
    ProofError for differences; otherwise return them. Raises CheckpointError.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint, adapters=True)
    check = check_tables(model, opened)
    if check.tables and not check.differences:
        check = _check_attention(model, read_state(opened).positions, check)
    if strict and check.differences:
        raise ProofError(" ".join((f"The model does not compute the scaling of {opened.name}.", *check.differences)))
    return check


def check_tables(model: nn.Module, checkpoint: Checkpoint) -> LoadedCheck:
    """Like check_loaded with `strict` false, but compares the rotary modules alone, without a pass of the model."""
    models = _models_in(model)
    if len(models) > 1:  # which of them a pass uses, only the wrapper knows
        names = ", ".join(models)
        return LoadedCheck(
            0, unproved=(f"{type(model).__name__} holds several models ({names}): check the one in use.",)
        )
    loaded, state = unwrapped(model), read_state(checkpoint)
    text, ropes = loaded.config.get_text_config(), state.positions.ropes
    differences, unproved, proved = [], [], 0
    try:
        tables = rotary_tables(loaded)
        if any(table.buffer.is_meta for table in tables):
            return LoadedCheck(0, unproved=("The model is on the device meta, where tables have no values.",))
    except PatchError as error:
        stock, why_not = prove_reading(checkpoint.config)
        if stock is None:  # transformers' own model has none either
            return LoadedCheck(0, unproved=(why_not,))
        return LoadedCheck(0, differences=(f"{error} {_config_cause(loaded, checkpoint)}",))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), unpatched_after(loaded):
        for table in tables:
            try:
                compare(table, ropes, table, _SIDES)
                proved += 1
            except ProofError as error:
                differences.append(f"{error} {_cause(loaded, checkpoint, table, state.positions)}")
            except PatchError as error:
                unproved.append(str(error))
    if (saved := state.saved_remapping) and text._attn_implementation != saved.attention:
        differences.append(f"The attention is {text._attn_implementation}, but {saved.method} needs {saved.attention}.")
    return LoadedCheck(proved, 0, tuple(differences), tuple(unproved))


def unwrapped(model: nn.Module) -> "PreTrainedModel":
    """The first transformers model in its wrappers. Raises CheckpointError if there is none."""
    if models := _models_in(model):
        return next(iter(models.values()))
    raise CheckpointError(f"{type(model).__name__} holds no transformers model.")


def _models_in(model: nn.Module) -> dict[str, "PreTrainedModel"]:
    """The transformers models that are not part of another one, by their names in the wrapper."""
    from transformers import PreTrainedModel

    models: dict[str, PreTrainedModel] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            models[name] = module
            inside |= {*module.modules()}
    return models


def _cause(model: "PreTrainedModel", checkpoint: Checkpoint, table: RotaryTable, positions: Positions) -> str:
    """Sentences on what a table that differs rotates by, and who is likely to have changed it."""
    dtype = table.buffer.dtype
    if dtype.itemsize < torch.float32.itemsize:
        return (
            f"The table is {str(dtype).removeprefix('torch.')}: the model was cast after loading (by model.to or "
            "model.half). Give from_pretrained the dtype, which keeps tables in float32."
        )
    try:
        prove_reading(checkpoint.config)
    except ProofError as error:
        return str(error)
    sentences, rope = [], positions.ropes.get(table.layer_type)
    if rope is not None and _rotates_by(table, rope.geometry.inv_freq()):
        sentences.append("These are the unscaled frequencies.")
        if "default" not in repr(getattr(model.config.get_text_config(), "rope_parameters", "default")):
            sentences.append(
                "The model's config scales: it was set after loading, or the module changed after loading."
            )
            return " ".join(sentences)
    for label, other in positions.ropes.items():
        if label != table.layer_type and _rotates_by(table, other.inv_freq):
            sentences.append(f"These are the frequencies of {label}.")
    kind = type(table.module)
    if not kind.__module__.startswith("transformers."):
        sentences.append(f"The rotary module is {kind.__module__}.{kind.__qualname__}, not that of transformers.")
    return " ".join([*sentences, _config_cause(model, checkpoint)])


def _rotates_by(table: RotaryTable, inv_freq: np.ndarray) -> bool:
    return table.inv_freq.shape == inv_freq.shape and np.allclose(table.inv_freq, inv_freq, rtol=1e-5, atol=0)


def _config_cause(model: "PreTrainedModel", checkpoint: Checkpoint) -> str:
    """A sentence on whether the model's config already differs, or only its modules."""
    with contextlib.suppress(CheckpointError):
        stock, config = read_stock_config(checkpoint.configured).get_text_config(), model.config.get_text_config()
        expected, fields = ({key: getattr(part, key, None) for key in _FIELDS} for part in (stock, config))
        if changes := diff(expected, fields):
            words = ", ".join(f"{path} is {shown(after)}, not {shown(before)}" for path, before, after in changes)
            return (
                f"In the model's config, {words}: it was loaded from another folder (its name is "
                f"{model.config.name_or_path!r}), or with arguments that override config.json, such as TRL's "
                "model_init_kwargs."
            )
    return "The model's config agrees with config.json, so the rotary module was changed after loading."


class _Comparison:
    """Compares each attention module with transformers' own code, from forward hooks.

    labels: the layer types that have a rotary table. recorder: the model's attention function.
    """

    def __init__(self, labels: Collection[str | None], recorder: AttentionRecorder) -> None:
        self.labels, self.recorder = labels, recorder
        self.rotations: dict[str | None, tuple[Tensor, ...]] = {}
        self.proved: set[nn.Module] = set()
        self.differences: list[str] = []
        self.unproved: list[str] = []

    def rotated(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        self.rotations[named.get("layer_type", args[2] if len(args) > 2 else None)] = tensors_of(output)

    def attended(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        live, stock = self._rotated_by(module), _stock_class(type(module))
        assert stock is not None
        twin = stock.__new__(stock)
        twin.__dict__.update({key: value for key, value in vars(module).items() if key != "forward"})
        stock.forward(twin, *args, **named)
        expected = self._rotated_by(twin)
        if not expected:  # it only holds the attention, or does not use transformers' interface
            return
        name = f"Layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"
        if len(live) != len(expected):
            self.unproved.append(f"{name} has attention code that cannot be compared. {_replaced(module, stock)}")
            return
        error = max(map(difference, live, expected))
        scaling, fresh = getattr(module, "scaling", None), _fresh_scaling(module, stock)
        if math.isnan(error):
            self.unproved.append(f"{name}: queries or keys are not finite. The weights may be, too.")
        elif fresh is not None and isinstance(scaling, float) and not math.isclose(fresh, scaling, rel_tol=1e-6):
            self.differences.append(f"{name}: its softmax scale is {scaling:g}; transformers' is {fresh:g}.")
        elif not error <= ALLOWED.get(live[0].dtype, ALLOWED[torch.bfloat16]):
            self.differences.append(
                f"{name}: queries and keys differ from those of transformers' own code by {error:.2g} of their size. "
                f"{_replaced(module, stock)}"
            )
        elif not self._has_its_rotation(module, named.get("position_embeddings")):
            self.differences.append(
                f"{name}: its cos and sin are not those that the rotary module computes for this layer. The model's "
                "forward pass was replaced."
            )
        else:
            self.proved.add(module)

    def _rotated_by(self, module: nn.Module) -> list[Tensor]:
        """The queries, with the softmax scale, and keys of a module's calls."""
        calls = [call for call in self.recorder.taken() if call.module is module]
        return [tensor for call in calls for tensor in (call.query * call.scaling, call.key)]

    def _has_its_rotation(self, module: nn.Module, embeddings: Any) -> bool:
        """Return whether the cos and sin that a layer gets, if any, are those of the rotary module for its type."""
        with contextlib.suppress(PatchError):  # a layer of an unknown type
            rotation = self.rotations.get(layer_label(module, self.labels), ())
            if embeddings is not None:
                pairs = zip(tensors_of(embeddings), rotation, strict=False)
                return bool(rotation) and all(torch.equal(*pair) for pair in pairs)
        return True


def _check_attention(model: nn.Module, positions: Positions, check: LoadedCheck) -> LoadedCheck:
    """Add the attention to a check of the tables that found no differences."""
    loaded, recorder = unwrapped(model), AttentionRecorder()
    tables = rotary_tables(loaded)
    comparison = _Comparison({table.layer_type for table in tables}, recorder)
    last = max(rope.scaled_length for rope in positions.ropes.values()) - 1
    received: list[Tensor] = []

    def spread(position_ids: Tensor) -> Tensor:
        received.append(position_ids.reshape(-1, position_ids.shape[-1])[0].cpu())
        places = torch.linspace(0, last, position_ids.shape[-1], device=position_ids.device, dtype=torch.float64)
        return places.long().expand_as(position_ids)

    try:
        with torch.compiler.set_stance("force_eager"), attending_by(loaded, recorder), contextlib.ExitStack() as hooks:
            change_positions(tables, spread)
            for module in modules_of(tables):
                hooks.callback(module.register_forward_hook(comparison.rotated, with_kwargs=True).remove)
            for module in loaded.modules():
                if type(module).__module__.startswith("bitsandbytes"):
                    module.training = True  # in evaluation mode it repacks weights on some CPUs, for good
                if _stock_class(type(module)):
                    hooks.callback(module.register_forward_hook(comparison.attended, with_kwargs=True).remove)
            ids = probe_ids(loaded, _TOKENS)
            model(input_ids=ids, use_cache=False)
            with contextlib.suppress(Exception):  # a model whose positions have another shape
                model(input_ids=ids, use_cache=False, position_ids=torch.arange(_TOKENS, device=ids.device)[None])
    except Exception as error:  # models and kernels raise many kinds of errors
        comparison.unproved.append(f"The attention cannot be compared: {reason_of(error)}.")
    changed = next((places for places in received if places.tolist() != list(range(_TOKENS))), None)
    if changed is not None:
        of_tokens = f"0 to {_TOKENS - 1} as the positions of {_TOKENS} tokens, but {shown(changed.tolist())}"
        comparison.differences.append(f"The rotary modules do not get {of_tokens}. A forward pass was replaced.")
    if not (comparison.proved or comparison.differences or comparison.unproved):
        comparison.unproved.append(f"{type(loaded).__name__} does not use transformers' attention interface.")
    unproved = (*check.unproved, *comparison.unproved[:1])
    return replace(
        check, layers=len(comparison.proved), differences=tuple(comparison.differences[:1]), unproved=unproved
    )


def _fresh_scaling(module: Any, stock: Any) -> float | None:
    """The softmax scale that transformers' class gives a module of this config; None where there is none to compare."""
    with contextlib.suppress(Exception), torch.device("meta"):  # constructors differ
        scaling = stock(module.config, module.layer_idx).scaling
        return scaling if isinstance(scaling, float) else None
    return None


def _stock_class(kind: type) -> Any:
    """The class of an attention module as transformers has it, imported a second time; None for other modules."""
    for base in kind.__mro__:  # FSDP2 derives classes
        if base.__module__.startswith(_STOCK) and base.__name__.endswith(("Attention", "MLA")):
            return getattr(_second_copy(base.__module__), base.__name__, None)
    return None


@lru_cache
def _second_copy(name: str) -> ModuleType:
    """A second copy of a module, without what was replaced in the first."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _replaced(module: nn.Module, stock: type) -> str:
    """A sentence on which functions of the attention were replaced, and where they are from. stock: its class."""
    name, forward = stock.__module__, f"{stock.__name__}.forward"
    original = {**vars(_second_copy(name)), forward: vars(stock).get("forward")}
    current = {**vars(sys.modules[name]), forward: vars(module).get("forward", type(module).forward)}
    sources = {
        key: (_source(value), _source(current.get(key)))
        for key, value in original.items()
        if isinstance(value, FunctionType)
    }
    replaced = [f"{key} is now {new}" for key, (old, new) in sources.items() if old != new]
    return f"Replaced in {name}: {', '.join(replaced)}." if replaced else "No function of its module was replaced."


def _source(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
