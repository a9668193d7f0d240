"""LongCE: the next-token loss with more weight on tokens that need a long context.

Fang et al. 2025, arXiv:2410.23771, section 4, as in the authors' finetune.py: a token's weight is
min(p(token | long context) / p(token | short context), 5), worked out by the trained model in the same step, and a
constant for the gradient. Tokens with no more than a short context before them have weight 1. The weighted losses are
divided by the number of tokens, not by the sum of the weights.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ropecli.data.sequences import UNSCORED
from ropecli.evaluation.protocols import ShortContext
from ropecli.training.loss import NextTokenLoss, weighted_sum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_WEIGHT = 5.0


class LongContextLoss(NextTokenLoss):
    """NextTokenLoss with LongCE's gradient. Its value is the plain loss, so that runs and lengths can be compared.

    short_context: how each sequence is read again, without gradients, before each pass. Sequences are whole, with
    positions 0, 1, 2 ... Without gradients it is a NextTokenLoss.
    """

    def __init__(self, model: "PreTrainedModel", short_context: ShortContext, **options: Any) -> None:
        super().__init__(model, **options)
        self._context = short_context

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None = None,
        packed: bool = False,
        document_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return super().forward(ids, labels, positions, packed)
        short = self._short_losses(ids, labels)
        with self._kept_elsewhere(ids.device):
            outputs = self.hidden(ids, positions, packed)
        with torch.autocast(ids.device.type, enabled=False):
            hidden = outputs.last_hidden_state.to(self._split.head.weight.dtype)

            def chunk_loss(part: torch.Tensor, chunk: slice) -> torch.Tensor:
                losses = self._losses(outputs, part, labels[:, chunk])
                weights = (short[:, chunk] - losses.detach()).clamp(max=math.log(LARGEST_WEIGHT)).exp()
                weights = torch.where(short[:, chunk].isnan(), 1.0, weights)
                return weighted_sum(losses, weights if document_labels is None else weights / document_labels[:, chunk])

            total = hidden.new_zeros((), dtype=torch.float32)
            for chunk in self._chunks(hidden):
                total = total + checkpoint(chunk_loss, hidden[:, chunk], chunk, use_reentrant=False)
        return total

    @torch.no_grad()
    def _short_losses(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of each label with a short context, nats, shape (batch, tokens); NaN where all of it is short."""
        losses = torch.full(ids.shape, math.nan, device=ids.device)
        for start, stop in self._context.windows(ids.shape[1]):
            outputs = self._split.decode(ids[:, start:stop])
            first = self._context.tokens - 1
            scored = slice(start + first, stop - 1)
            with torch.autocast(ids.device.type, enabled=False):
                hidden = outputs.last_hidden_state[:, first:-1]
                hidden = hidden.to(self._split.head.weight.dtype)
                parts = [
                    self._losses(outputs, hidden[:, chunk], labels[:, scored][:, chunk])
                    for chunk in self._chunks(hidden)
                ]
            losses[:, scored] = torch.cat(parts, dim=1)
        return losses

    def _losses(self, outputs: object, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Loss of each label, shape (batch, tokens), nats; 0 for UNSCORED."""
        logits = self._split.logits(outputs, hidden)
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=UNSCORED, reduction="none")
        return losses.view(labels.shape)
