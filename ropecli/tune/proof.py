"""The proof that a model is the one that was tuned: by the logits of a few tokens."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ropecli.errors import ProofError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Of a logit, relative to the largest: what a dtype's rounding leaves between the live model and its weights folded."""


@torch.inference_mode()
def logits_of(model: "PreTrainedModel", probe: Tensor) -> Tensor:
    """float32, on the CPU, shape (1, tokens, vocabulary)."""
    return model(input_ids=probe.to(model.device), use_cache=False).logits.float().cpu()


def difference(one: Tensor, other: Tensor) -> float:
    """The largest of a logit, relative to the largest of all."""
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-6))


def refuse_other(found: Tensor, tuned: Tensor, dtype: torch.dtype, what: str) -> None:
    """found, tuned: logits, computed in dtype. what: how the message begins. Raises ProofError, for NaN too."""
    off, allowed = difference(found, tuned), _ALLOWED[dtype]
    if not off <= allowed:
        raise ProofError(
            f"{what} other logits than the tuned model (off by {off:.2g} of the largest, where {allowed:g} is "
            f"{str(dtype).removeprefix('torch.')}'s rounding): nothing is written."
        )
