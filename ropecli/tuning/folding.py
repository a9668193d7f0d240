"""Puts learned weights where the files hold them, and proves that the model is then the tuned one.

The proof compares logits of a few tokens, in float32 if memory allows. Files are rewritten shard by shard, in the dtype
that they had.
"""

import contextlib
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import OutputError, PatchError, ProofError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed difference of a logit, relative to the largest logit, between two ways to compute the same."""


class StoredWeight(NamedTuple):
    """The name and the dtype of a weight in the files."""

    name: str
    dtype: torch.dtype


def find_stored(checkpoint: Checkpoint, model: "PreTrainedModel", names: Iterable[str]) -> dict[str, StoredWeight]:
    """Where the files hold these weights of the unchanged model, by their names in the model.

    The names in the files may differ: of the tensors with the same shape and values, the one whose name ends most
    alike is taken. Raises PatchError for a weight that no file holds.
    """
    with contextlib.ExitStack() as files:
        stored: dict[str, Any] = {}
        for path in checkpoint.weight_files():
            file = files.enter_context(safe_open(path, framework="pt"))
            stored |= dict.fromkeys(file.keys(), file)
        return {name: _find(stored, name, model.get_parameter(name).detach().cpu()) for name in names}


def _find(stored: Mapping[str, Any], name: str, value: Tensor) -> StoredWeight:
    def common_end(key: str) -> int:
        pairs = zip(reversed(key.split(".")), reversed(name.split(".")), strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    for key in sorted(stored, key=common_end, reverse=True):
        if tuple(stored[key].get_slice(key).get_shape()) == tuple(value.shape):
            tensor = stored[key].get_tensor(key)
            if torch.equal(tensor.double(), value.double()):
                return StoredWeight(key, tensor.dtype)
    raise PatchError(
        f"No weight file holds {name} with the values that the model has in {short_name(value.dtype)}: transformers "
        "makes it from other tensors, or rounds it. Load it in the dtype of the files, by --dtype."
    )


class Logits(NamedTuple):
    """values: float32, on the CPU, shape (1, tokens, vocabulary). dtype: of the model that computed them."""

    values: Tensor
    dtype: torch.dtype


class Folded(NamedTuple):
    """logits: of the probe, by the model with these weights. changed: weights by their names in the files, in their
    dtype there; empty where only constants were found. rounding: the change of a logit when the weights are rounded to
    that dtype.
    """

    logits: Logits
    changed: Mapping[str, Tensor] = MappingProxyType({})
    rounding: float = 0.0


def fold(
    model: "PreTrainedModel",
    weights: Mapping[str, Tensor],
    stored: Mapping[str, StoredWeight],
    live: Logits,
    probe: Tensor,
) -> Folded:
    """Sets the weights in the model, and proves that it gives the tuned model's logits.

    weights: float64, by their names in the model; stored: where the files hold them. live: the tuned model's logits of
    the probe, token ids, shape (1, tokens). Raises ProofError.
    """
    rounded = {name: weights[name].to(one.dtype) for name, one in stored.items()}
    exact = exact_logits(model, probe, weights)
    require_same(exact, live, "The folded weights give")
    rounding = difference(exact_logits(model, probe, rounded), exact)
    with torch.no_grad():
        for name, value in rounded.items():
            model.get_parameter(name).copy_(value)
    changed = {one.name: rounded[name] for name, one in stored.items()}
    return Folded(logits_of(model, probe), changed, rounding)


def rewrite_shard(changed: Mapping[str, Tensor], source: Path, target: Path) -> bool:
    """Writes the shard with the changed tensors in place of its own; False where it has none of them.

    Raises OutputError.
    """
    from safetensors.torch import save_file

    with safe_open(source, framework="pt") as file:
        names = set(file.keys()) & changed.keys()
        if not names:
            return False
        tensors = {name: changed[name].contiguous() if name in names else file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    try:
        save_file(tensors, target, metadata=metadata)
    except SafetensorError as error:
        raise OutputError(f"{target.name} could not be written: {error}. Make room.") from error
    target.chmod(source.stat().st_mode & 0o777)  # safetensors writes for the owner alone
    return True


@torch.inference_mode()
def logits_of(model: "PreTrainedModel", probe: Tensor) -> Logits:
    values = model(input_ids=probe.to(model.device), use_cache=False).logits.float().cpu()
    return Logits(values, model.dtype)


def exact_logits(
    model: "PreTrainedModel", probe: Tensor, weights: Mapping[str, Tensor] = MappingProxyType({})
) -> Logits:
    """The logits with these weights in place of the model's own, in float32 if memory allows.

    Half precision's rounding would hide a wrong fold, and make a right one look wrong. The model is left as it was.
    """
    try:
        return _logits_with(weights, model, probe, widen=True)
    except RuntimeError:  # out of memory, or a kernel that requires half precision
        return _logits_with(weights, model, probe, widen=False)


def _logits_with(weights: Mapping[str, Tensor], model: "PreTrainedModel", probe: Tensor, *, widen: bool) -> Logits:
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, values in before:
            if widen and parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = values.float()
        for name, value in weights.items():
            parameter = model.get_parameter(name)
            parameter.data = value.to(parameter)
        return logits_of(model, probe)
    finally:
        for parameter, values in before:
            parameter.data = values


def difference(one: Logits, other: Logits) -> float:
    """The largest difference of a logit, relative to the largest logit."""
    return float((one.values - other.values).abs().max() / other.values.abs().max().clamp_min(1e-6))


def require_same(found: Logits, tuned: Logits, what: str) -> None:
    """Raises ProofError where the logits differ or are NaN. what: the beginning of the message."""
    off = difference(found, tuned)
    allowed, dtype = max((_ROUNDING[one.dtype], short_name(one.dtype)) for one in (found, tuned))
    if not off <= allowed:
        raise ProofError(
            f"{what} other logits than the tuned model (off by {off:.2g} of the largest, where {allowed:g} is "
            f"{dtype}'s rounding): nothing is written."
        )


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
