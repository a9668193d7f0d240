"""The next-token loss without [tokens × vocabulary] logits, as a module that Accelerate can wrap."""

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy, linear_cross_entropy
from torch.utils.checkpoint import checkpoint

from ropecli.data.sequences import UNSCORED
from ropecli.live.lm_head import SplitModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 512
"""Tokens whose logits exist at once, at most; fewer where the vocabulary is large."""
_LOGITS = 2**25


class NextTokenLoss(torch.nn.Module):
    """Negative log-likelihood, nats, summed over the labels of a batch of sequences under `model`.

    Heads that are one matrix go through a chunked linear cross entropy: Liger's kernel on a GPU where it is installed,
    torch's elsewhere. Heads that cap or scale their logits are recomputed chunk by chunk in the backward pass.

    offload: what the decoder's backward pass needs waits in the CPU's memory; with gradient checkpointing that is one
    hidden state a layer.
    """

    def __init__(self, model: "PreTrainedModel", *, offload: bool = False) -> None:
        super().__init__()
        self.model = model
        self.offload = offload
        self._split = SplitModel(model)
        self._chunk = max(1, min(_CHUNK, _LOGITS // self._split.vocabulary))

    @property
    def config(self) -> Any:
        """The model's own: engines ask what they wrap for it."""
        return self.model.config

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None, packed: bool = False
    ) -> torch.Tensor:
        """ids, labels, positions: shape (batch, tokens). labels: the token that follows each, or UNSCORED.

        positions: by default 0, 1, 2 ... packed: where they do not go on by one, another document begins, which
        attends to nothing before it; otherwise gaps are gaps. All tokens are real: nothing is padded.
        """
        with self._kept_elsewhere(ids.device):
            outputs = self.hidden(ids, positions, packed)
        # logits in the head's own precision, and the loss in float32
        with torch.autocast(ids.device.type, enabled=False):
            # autocast may leave another precision than a frozen head's
            hidden = outputs.last_hidden_state.to(self._split.head.weight.dtype)
            if self._split.plain_head:
                return self._of_plain_head(hidden.flatten(0, 1), labels.flatten())
            return self._recomputed(outputs, hidden, labels)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor | None, packed: bool) -> Any:
        """The decoder's output; last_hidden_state: shape (batch, tokens, width)."""
        others = {} if positions is None else {"position_ids": positions}
        if positions is not None and not packed:
            # without a mask, transformers takes every gap in the positions for the border of a document
            others["attention_mask"] = torch.ones_like(ids)
        return self._split.decode(ids, **others)

    def _kept_elsewhere(self, device: torch.device) -> AbstractContextManager:
        if not self.offload:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")

    def _of_plain_head(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = self._split.head.weight
        if hidden.device.type == "cuda" and find_spec("liger_kernel"):
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return LigerFusedLinearCrossEntropyLoss(ignore_index=UNSCORED, reduction="sum")(weight, hidden, labels)
        options = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=self._chunk, chunking_method=None, acc_policy="compact"
        )
        return linear_cross_entropy(
            hidden.float(), weight.float(), labels, reduction="sum", ignore_index=UNSCORED, options=options
        )

    def _recomputed(self, outputs: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        def chunk_loss(part: torch.Tensor, part_labels: torch.Tensor) -> torch.Tensor:
            logits = self._split.logits(outputs, part)
            return cross_entropy(logits.flatten(0, 1), part_labels.flatten(), ignore_index=UNSCORED, reduction="sum")

        total = hidden.new_zeros((), dtype=torch.float32)
        step = max(1, self._chunk // len(hidden))
        for start in range(0, hidden.shape[1], step):
            part, part_labels = hidden[:, start : start + step], labels[:, start : start + step]
            total = total + checkpoint(chunk_loss, part, part_labels, use_reentrant=False)
        return total
