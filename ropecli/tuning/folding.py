"""Changed weights on their way into a checkpoint's files: shard by shard, in the dtype that they had there."""

import contextlib
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import OutputError, PatchError, ProofError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
