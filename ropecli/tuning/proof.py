"""The proof that a model is the one that was tuned: by the logits of a few tokens."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ropecli.errors import ProofError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of a logit, relative to the largest: what a dtype's rounding leaves between two ways to compute the same."""


class Logits(NamedTuple):
    """values: float32, on the CPU, shape (1, tokens, vocabulary). dtype: what they were computed in."""

    values: Tensor
    dtype: torch.dtype


@torch.inference_mode()
def logits_of(model: "PreTrainedModel", probe: Tensor) -> Logits:
    values = model(input_ids=probe.to(model.device), use_cache=False).logits.float().cpu()
    return Logits(values, model.dtype)


@contextlib.contextmanager
def in_float32(model: "PreTrainedModel", probe: Tensor) -> Iterator[None]:
    """A model in half precision computes in float32, if there is room and it can; at the end its weights are as before.

    Rounding would hide in half precision whether weights are folded right, and make right ones look wrong.
    """
    before = [(one, one.data) for one in model.parameters() if one.dtype in (torch.float16, torch.bfloat16)]

    def put_back() -> None:
        for parameter, values in before:
            parameter.data = values

    try:
        try:
            for parameter, values in before:
                parameter.data = values.float()
            if before:
                logits_of(model, probe)
        except RuntimeError:  # out of memory, or a kernel that wants half precision
            put_back()
        yield
    finally:
        put_back()


def difference(one: Logits, other: Logits) -> float:
    """The largest of a logit, relative to the largest of all."""
    return float((one.values - other.values).abs().max() / other.values.abs().max().clamp_min(1e-6))


def refuse_other(found: Logits, tuned: Logits, what: str) -> None:
    """what: how the message begins. Raises ProofError, for NaN too."""
    off = difference(found, tuned)
    allowed, dtype = max((_ALLOWED[one.dtype], str(one.dtype)) for one in (found, tuned))
    if not off <= allowed:
        raise ProofError(
            f"{what} other logits than the tuned model (off by {off:.2g} of the largest, where {allowed:g} is "
            f"{dtype.removeprefix('torch.')}'s rounding): nothing is written."
        )
