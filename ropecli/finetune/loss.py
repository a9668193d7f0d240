"""The next-token loss without [tokens × vocabulary] logits, as a module that Accelerate can wrap."""

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy, linear_cross_entropy
from torch.utils.checkpoint import checkpoint

from ropecli.checkpoint.heads import SplitModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 512
"""Tokens whose logits exist at once."""


class NextTokenLoss(torch.nn.Module):
    """Mean negative log-likelihood, nats per token, of a batch of sequences under `model`.

    Heads that are one matrix go through torch's chunked linear cross entropy; heads that cap or scale their
    logits are recomputed chunk by chunk in the backward pass.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.model = model
        self._split = SplitModel(model)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: shape (batch, tokens), all of them real: sequences are full, so nothing is padded."""
        outputs = self._split.decode(ids)
        hidden, targets = outputs.last_hidden_state[:, :-1], ids[:, 1:]
        # the loss in float32, whatever the decoder's precision
        with torch.autocast(ids.device.type, enabled=False):
            if self._split.plain_head:
                weight = self._split.head.weight
                options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=_CHUNK, chunking_method=None)
                flat = hidden.flatten(0, 1).float()
                return linear_cross_entropy(flat, weight.float(), targets.flatten(), options=options)
            return self._recomputed(outputs, hidden.float(), targets) / targets.numel()

    def _recomputed(self, outputs, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        def chunk_loss(part: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self._split.logits(outputs, part)
            return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

        total = hidden.new_zeros(())
        step = max(1, _CHUNK // len(hidden))
        for start in range(0, hidden.shape[1], step):
            part, labels = hidden[:, start : start + step], targets[:, start : start + step]
            total = total + checkpoint(chunk_loss, part, labels, use_reentrant=False)
        return total
