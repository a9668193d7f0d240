"""Finds the weights that give a layer's queries, and where the files hold them; writes changed weights back.

Which rows of which weight give the two dimensions of a rotary pair, the model itself tells. A module's output is
replaced by the number of each of its rows, in binary, one digit a sequence; where the queries that reach the attention
hold these digits unchanged, the module is their last producer. At position 0 no pair is rotated. So fused projections,
interleaved heads and MLA need no table of architectures.

Files are rewritten shard by shard, in the dtype that they had.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropecli.attention.attention_probe import attending_by, causal_attention, in_evaluation
from ropecli.attention.head_layout import HeadLayout, find_rotating_layers, layer_label
from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import OutputError, PatchError, ProofError
from ropecli.live.rotary import restored, rotary_tables
from ropecli.live.stock_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_DIGITS = 20
"""Sequences: 19 of digits and one of ones; so many digits number half a million rows."""
_SAME = 1e-2
"""Relative, between digits that went the same way: half precision's rounding of an attention factor."""


class Queries(NamedTuple):
    """The last producer of a layer's queries. name: the module's, in the model. rows: shape (2, heads, pairs), where in
    the last dimension of its output the first and the second dimension of each pair are. projection: whether it is a
    linear map; otherwise a norm, whose weight can make a pair longer, not rotate it.
    """

    name: str
    rows: Tensor
    projection: bool

    @property
    def shared(self) -> bool:
        """Whether all heads have the same rows: they go through a norm one by one."""
        return self.rows.shape[1] > 1 and bool((self.rows == self.rows[:, :1]).all())


def find_queries(model: "PreTrainedModel", labels: Collection[str | None]) -> list[Queries]:
    """Of every layer that rotates by a rope of these labels (layer types; None where all share one).

    The model is afterwards what it was. Raises PatchError with the reason where a layer's queries come from no module
    with a weight of its own, or rotate in a way that is not understood (see head_layout.find_rotating_layers).
    """
    tables = rotary_tables(model)
    pairs = {table.layer_type: len(table.inv_freq) for table in tables}
    layout, layers = find_rotating_layers(model, labels)
    capture, names = _Capture(), {module: name for name, module in model.named_modules()}
    found: dict[int, Queries] = {}
    attending = attending_by(model, capture)
    with torch.no_grad(), quiet_transformers(), in_evaluation(model), restored(tables), attending:
        for name in _candidates(layers):
            for layer, numbers in _numbered(model, capture, layers, name).items():
                owner = layers[layer]
                rows = _rows(numbers, layout, pairs[layer_label(owner, pairs)])
                if bool((rows >= 0).all()):
                    module = owner.get_submodule(name)
                    found[layer] = Queries(names[module], rows, isinstance(module, torch.nn.Linear))
    if missing := [index for index in range(len(layers)) if index not in found]:
        owner = layers[missing[0]]
        raise PatchError(
            f"Layer {getattr(owner, 'layer_idx', missing[0])} ({type(owner).__name__}): its queries do not come "
            "unchanged from a projection or a norm, so that nothing can be folded into a weight."
        )
    if len({queries.name for queries in found.values()}) < len(found):
        raise PatchError(
            "Several layers share the projection of their queries: what suits the one would change another."
        )
    return [found[index] for index in range(len(layers))]


def _rows(numbers: Tensor, layout: HeadLayout, pairs: int) -> Tensor:
    """numbers: by head and dimension. As Queries.rows."""
    at = layout.rotary_start + (2 if layout.neighbours else 1) * torch.arange(pairs)
    return torch.stack([numbers[:, at], numbers[:, at + (1 if layout.neighbours else pairs)]])


class _Capture:
    """An attention function that keeps the queries it gets, and a mask function."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Tensor]] = []

    def mask(self, *, batch_size: int, **others: Any) -> Tensor:
        return torch.zeros((batch_size, 1, 1, 1), dtype=torch.int64)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any
    ) -> tuple[Tensor, None]:
        self.calls.append((module, query[:, :, 0].float()))
        return causal_attention(query, key, value, others.get("scaling")), None

    def run(self, model: "PreTrainedModel") -> None:
        """A pass over one token in `_DIGITS` sequences."""
        self.calls.clear()
        embeddings: Any = model.get_input_embeddings()
        device = embeddings.weight.device
        model(input_ids=torch.zeros((_DIGITS, 1), dtype=torch.int64, device=device), use_cache=False)


def _candidates(layers: list[Any]) -> list[str]:
    """The modules with a weight in an attention, by their names there, as they are defined: of two that fit, the later
    one is taken.
    """
    return list(
        dict.fromkeys(name for layer in layers for name, part in layer.named_modules() if name and _has_weight(part))
    )


def _has_weight(module: torch.nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim in (1, 2)


def _numbered(model: "PreTrainedModel", capture: _Capture, layers: list[Any], name: str) -> dict[int, Tensor]:
    """By layer, for every head and dimension, which row of this module's output it is, or -1; shape (heads, width)."""
    with contextlib.ExitStack() as hooks:
        sizes: dict[int, int] = {}
        for index, layer in enumerate(layers):
            with contextlib.suppress(AttributeError):
                hooks.enter_context(_giving_numbers(layer.get_submodule(name), sizes, index))
        try:
            capture.run(model)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, ValueError):  # what it gives is more than a row of states for each token
            return {}
        given = {id(module): query for module, query in capture.calls}
    return {index: _read_numbers(given[id(layers[index])], size) for index, size in sizes.items()}


@contextlib.contextmanager
def _giving_numbers(module: Any, sizes: dict[int, int], index: int) -> Iterator[None]:
    """The module's output is its rows' numbers, from 1 on: a binary digit a sequence, and in the last sequence ones."""

    def replace(_: Any, arguments: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        size = sizes[index] = output.shape[-1]
        numbers = torch.arange(1, size + 1, device=output.device)
        digits = (numbers >> torch.arange(_DIGITS - 1, device=output.device)[:, None]) & 1
        rows = torch.cat([digits, torch.ones_like(digits[:1])]).to(output.dtype)
        return rows.reshape(_DIGITS, *[1] * (output.ndim - 2), size).expand_as(output).clone()

    handle = module.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def _read_numbers(query: Tensor, size: int) -> Tensor:
    """query: shape (_DIGITS, heads, width). A norm in between makes the digits of each sequence of another size."""
    ones, digits = query[-1], query[:-1]
    written = digits.abs() > ones.abs() / 2
    alike = (digits - written * ones).abs() <= _SAME * ones.abs()
    numbers = (written.long() << torch.arange(_DIGITS - 1, device=query.device)[:, None, None]).sum(dim=0) - 1
    sound = alike.all(dim=0) & (ones > 0) & (numbers >= 0) & (numbers < size)
    return torch.where(sound, numbers, -1).cpu()


class Stored(NamedTuple):
    """A parameter as the files hold it. name: there. dtype: there."""

    name: str
    dtype: torch.dtype


def find_stored(checkpoint: Checkpoint, model: "PreTrainedModel", names: Iterable[str]) -> dict[str, Stored]:
    """Where the files hold these parameters of the model, none of which is changed yet; by their names in the model.

    transformers may put a prefix before what a file calls a weight, leave one out, or call it otherwise: of the tensors
    of the same shape and layer the one that is called most alike among those with the same values. Raises PatchError
    for a parameter that is in none of the files.
    """
    with contextlib.ExitStack() as files:
        stored: dict[str, Any] = {}
        for path in checkpoint.weight_files():
            file = files.enter_context(safe_open(path, framework="pt"))
            stored |= dict.fromkeys(file.keys(), file)
        return {name: _find(stored, name, model.get_parameter(name).detach()) for name in names}


def _find(stored: Mapping[str, Any], name: str, value: Tensor) -> Stored:
    alike = [key for key in stored if _numbers(key) == _numbers(name)]
    for key in sorted(alike, key=lambda key: _common_end(key, name), reverse=True):
        if tuple(stored[key].get_slice(key).get_shape()) != tuple(value.shape):
            continue
        tensor = stored[key].get_tensor(key)
        if torch.equal(tensor.to(value.dtype), value.cpu()):
            return Stored(key, tensor.dtype)
    raise PatchError(
        f"{name} is in none of the weight files as it is in the model: transformers makes it of others when it loads "
        "them, so that it cannot be written back."
    )


def _numbers(name: str) -> list[str]:
    """Those of its layer, and of its part in it."""
    return [part for part in name.split(".") if part.isdigit()]


def _common_end(one: str, other: str) -> int:
    """How many parts of two names are the same, from the end."""
    ends = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], ends))


def refuse_unwritten(changed: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    """Raises ProofError where the files hold other numbers; in half precision logits alone would not tell."""
    missing = dict(changed)
    for path in checkpoint.weight_files() if changed else []:
        with safe_open(path, framework="pt") as file:
            for name in missing.keys() & set(file.keys()):
                if torch.equal(file.get_tensor(name), missing[name]):
                    del missing[name]
    if missing:
        raise ProofError(f"{min(missing)} was not written as it was folded: nothing is written.")


def rewrite_shard(changed: Mapping[str, Tensor], source: Path, target: Path) -> bool:
    """Writes the shard with the changed tensors, by their names in the files, for its own; False where it has none.

    Raises OutputError.
    """
    from safetensors.torch import save_file

    with safe_open(source, framework="pt") as file:
        names = list(file.keys())
        if not changed.keys() & set(names):
            return False
        tensors = {name: file.get_tensor(name) for name in names}
        metadata = file.metadata()
    tensors |= {name: changed[name].contiguous() for name in changed.keys() & set(names)}
    try:
        save_file(tensors, target, metadata=metadata)
    except SafetensorError as error:
        raise OutputError(f"{target.name} could not be written: {error}. Make room.") from error
    target.chmod(source.stat().st_mode & 0o777)  # safetensors writes for the owner alone
    return True
