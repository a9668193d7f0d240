"""The negative log-likelihood of every token in one pass, the head applied chunk by chunk."""

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from ropecli.checkpoint.heads import SplitModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGITS_AT_ONCE = 2**24
"""Numbers in one chunk of logits: 64 MiB in float32."""


class TokenScorer:
    """Scores sequences with a causal LM."""

    def __init__(self, model: "PreTrainedModel") -> None:
        self.split = SplitModel(model)

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: shape (batch, tokens). Returns shape (batch, tokens - 1), nats, float32: -ln p(ids[t] | ids[:t])."""
        outputs = self.split.decode(ids)
        hidden, targets = outputs.last_hidden_state[:, :-1], ids[:, 1:]
        step = max(1, _LOGITS_AT_ONCE // (self.split.vocabulary * len(ids)))
        parts = []
        for start in range(0, hidden.shape[1], step):
            logits = self.split.logits(outputs, hidden[:, start : start + step])
            part = targets[:, start : start + step]
            parts.append(cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="none").view(part.shape))
        return torch.cat(parts, dim=1)
