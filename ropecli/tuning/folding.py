"""Fold learned parameters into the model's weights, and prove that the logits stay the same.

The proof compares the logits of a few tokens, in float32 if memory allows. Weight files are rewritten shard by shard in
their own dtype.
"""

import contextlib
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ropecli.checkpoint.opening import Checkpoint
from ropecli.errors import PatchError, ProofError
from ropecli.live.devices import input_device
from ropecli.live.loading import is_quantized
from ropecli.training.finished_weights import explain_full_disk, refuse_not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed rounding difference of a logit, relative to the largest logit."""


StoredWeight = tuple[str, torch.dtype]
"""Name and dtype of a weight in the files."""


def find_stored(checkpoint: Checkpoint, model: "PreTrainedModel", names: Iterable[str]) -> dict[str, StoredWeight]:
    """Find weights of the unchanged model in the files. Returns their stored names and dtypes by name in the model.

    The names in the files may differ. Among tensors with the same shape and values, the one with the longest common
    name suffix is used. Raises PatchError for a weight that is not in the files.
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
                return key, tensor.dtype
    raise PatchError(
        f"The weight files do not contain {name} with the values that the model has in {short_name(value.dtype)}: "
        "transformers computes it from other tensors or rounds it. Set --dtype to the dtype of the files."
    )


class Logits(NamedTuple):
    """values: float32, on the CPU, shape (1, tokens, vocabulary). dtype: how they were rounded."""

    values: Tensor
    dtype: torch.dtype


class Folded(NamedTuple):
    """logits: logits of the probe with the tuned weights. changed: changed weights by name in the files, in the dtype
    of the files; empty if only constants were tuned. rounding: change of the logits when rounding to that dtype.
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
    """Set the weights in the model, and prove that its logits equal those of the tuned model.

    weights: float64, by name in the model. stored: their names and dtypes in the files. live: the tuned model's logits
    of the probe. probe: token ids, shape (1, tokens). Raises ProofError, NotFiniteError.
    """
    rounded = {name: weights[name].to(dtype) for name, (_, dtype) in stored.items()}
    refuse_not_finite(rounded.items(), "Use --level grid, which does not change weights.")
    exact = exact_logits(model, probe, weights)
    require_same(exact, live, "the folded weights")
    rounding = difference(exact_logits(model, probe, rounded), exact)
    with torch.no_grad():
        for name, value in rounded.items():
            model.get_parameter(name).copy_(value)
    changed = {stored_name: rounded[name] for name, (stored_name, _) in stored.items()}
    return Folded(logits_of(model, probe), changed, rounding)


def rewrite_shard(changed: Mapping[str, Tensor], source: Path, target: Path) -> bool:
    """Write a copy of the shard with the changed tensors. Returns False if it contains none of them.

    Raises OutputError.
    """
    from safetensors.torch import save_file

    with safe_open(source, framework="pt") as file:
        names = set(file.keys()) & changed.keys()
        if not names:
            return False
        tensors = {name: changed[name].contiguous() if name in names else file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    with explain_full_disk(target):
        save_file(tensors, target, metadata=metadata)
    target.chmod(source.stat().st_mode & 0o777)  # safetensors makes files readable only by their owner
    return True


@torch.inference_mode()
def logits_of(model: "PreTrainedModel", probe: Tensor) -> Logits:
    values = model(input_ids=probe.to(input_device(model)), use_cache=False).logits.float().cpu()
    return Logits(values, torch.bfloat16 if is_quantized(model) else model.dtype)


def exact_logits(
    model: "PreTrainedModel", probe: Tensor, weights: Mapping[str, Tensor] = MappingProxyType({})
) -> Logits:
    """Compute the logits with these weights instead of the model's own, in float32 if memory allows.

    Rounding in half precision could hide a wrong fold or reject a correct one. The model is restored.
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


def difference(logits: Logits, reference: Logits) -> float:
    """Largest difference of a logit, relative to the largest logit of the reference."""
    return float((logits.values - reference.values).abs().max() / reference.values.abs().max().clamp_min(1e-6))


def require_same(logits: Logits, tuned: Logits, source: str) -> None:
    """Raise ProofError if the logits differ or are NaN. source: where `logits` come from, for the message."""
    off = difference(logits, tuned)
    allowed, dtype = max((_ROUNDING[dtype], short_name(dtype)) for dtype in (logits.dtype, tuned.dtype))
    if not off <= allowed:
        raise ProofError(
            f"The logits of {source} differ from those of the tuned model by {off:.2g} of the largest; {dtype} "
            f"allows {allowed:g}. Nothing was written."
        )


def short_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
