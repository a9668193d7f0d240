"""Next-token loss without full [tokens × vocabulary] logits, as a module that Accelerate can wrap.

Also: an error for running out of memory, the switch for gradient checkpointing, and a check that a model follows its
position_ids.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from ropecli.attention.head_layout import in_evaluation
from ropecli.data.sequences import UNSCORED
from ropecli.data.stream import Batch
from ropecli.errors import RecipeError, RopecliError
from ropecli.evaluation.protocols import ShortContext
from ropecli.live.devices import probe_ids
from ropecli.live.lm_head import SplitModel
from ropecli.live.skeleton import make_small_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK = 512
"""Maximum number of tokens whose logits exist at once; fewer for a large vocabulary."""
_LOGITS = 2**25
_HALF = 8
_GAP = 5
_ROUNDINGS = 16
Weighting = Callable[[torch.Tensor, slice], torch.Tensor]
"""Given the losses of labels, shape (batch, tokens), and their slice of the tokens: their weights."""


class NextTokenLoss(torch.nn.Module):
    """Negative log-likelihood in nats, summed over the labels of a batch of sequences.

    A head that is a single matrix uses a chunked linear cross entropy: Liger's kernel on a GPU if installed, otherwise
    torch's. A head that caps or scales its logits, and any head before torch 2.13, is recomputed chunk by chunk in the
    backward pass.

    offload: keep the decoder's saved activations in CPU memory; with gradient checkpointing, one hidden state per
    layer. split: the model's decoder and head, if its weights cannot tell what the head does.
    """

    def __init__(self, model: "PreTrainedModel", *, offload: bool = False, split: SplitModel | None = None) -> None:
        super().__init__()
        self.model = model
        self.offload = offload
        self.split = split or SplitModel(model)
        self._chunk = max(1, min(_CHUNK, _LOGITS // self.split.vocabulary))

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None = None,
        packed: bool = False,
        document_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """All tensors: shape (batch, tokens). labels: the token that follows each, or UNSCORED.

        positions: default 0, 1, 2 ... packed: a document starts where positions do not increase by one, and attends
        only to itself; otherwise tokens attend across such gaps. There is no padding. Returns Σ nll, nats.
        document_labels: see Batch. With them, the gradient is that of Σ nll ÷ document_labels.
        """
        weigh = self._weighting(Batch(ids, labels, positions, packed, document_labels))
        with self._kept_elsewhere(ids.device):
            outputs = self.hidden(ids, positions, packed)
        # logits in the head's dtype, the loss in float32
        with torch.autocast(ids.device.type, enabled=False):
            # autocast may return another dtype than a frozen head's
            hidden = outputs.last_hidden_state.to(self.split.head.weight.dtype)
            # Liger 0.6 computes wrong gradients of a weighted sum
            liger = weigh is None and _suits_liger(hidden)
            if self.split.plain_head and (liger or hasattr(torch.nn, "LinearCrossEntropyOptions")):
                return self._of_plain_head(hidden, labels, weigh)
            return self._recomputed(outputs, hidden, labels, weigh)

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor | None, packed: bool) -> Any:
        """The decoder's output; last_hidden_state: shape (batch, tokens, width)."""
        options = {} if positions is None else {"position_ids": positions}
        if positions is not None and not packed:
            # without a mask, transformers treats every gap in the positions as a document boundary
            options["attention_mask"] = torch.ones_like(ids)
        return self.split.decode(ids, **options)

    def _weighting(self, batch: Batch[torch.Tensor]) -> Weighting | None:
        """The weights of the gradient; None if all are 1."""
        counts = batch.document_labels
        return None if counts is None else lambda losses, chunk: 1 / counts[:, chunk]

    def _kept_elsewhere(self, device: torch.device) -> AbstractContextManager:
        if not self.offload:
            return nullcontext()
        return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")

    def _of_plain_head(self, hidden: torch.Tensor, labels: torch.Tensor, weigh: Weighting | None) -> torch.Tensor:
        weight, states, targets = self.split.head.weight, hidden.flatten(0, 1), labels.flatten()
        if weigh is None and _suits_liger(hidden):
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return LigerFusedLinearCrossEntropyLoss(ignore_index=UNSCORED, reduction="sum")(weight, states, targets)
        options = torch.nn.LinearCrossEntropyOptions(
            batch_chunk_size=self._chunk, chunking_method=None, acc_policy="compact"
        )
        reduction = "sum" if weigh is None else "none"
        losses = functional.linear_cross_entropy(
            states.float(), weight.float(), targets, reduction=reduction, ignore_index=UNSCORED, options=options
        )
        return losses if weigh is None else _weighted_sum(losses.view(labels.shape), weigh, slice(None))

    def _recomputed(
        self, outputs: Any, hidden: torch.Tensor, labels: torch.Tensor, weigh: Weighting | None
    ) -> torch.Tensor:
        def chunk_loss(part: torch.Tensor, chunk: slice) -> torch.Tensor:
            if weigh is None:
                return self._losses(outputs, part, labels[:, chunk], "sum")
            return _weighted_sum(self._losses(outputs, part, labels[:, chunk]), weigh, chunk)

        total = hidden.new_zeros((), dtype=torch.float32)
        for chunk in self._chunks(hidden):
            total = total + checkpoint(chunk_loss, hidden[:, chunk], chunk, use_reentrant=False)
        return total

    def _losses(
        self, outputs: Any, hidden: torch.Tensor, labels: torch.Tensor, reduction: str = "none"
    ) -> torch.Tensor:
        """Loss of each label, shape (batch, tokens), nats; 0 for UNSCORED. reduction: sum for their sum."""
        logits = self.split.logits(outputs, hidden)
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=UNSCORED, reduction=reduction)
        return losses if reduction == "sum" else losses.view(labels.shape)

    def _chunks(self, hidden: torch.Tensor) -> list[slice]:
        step = max(1, self._chunk // len(hidden))
        return [slice(start, start + step) for start in range(0, hidden.shape[1], step)]


class LongContextLoss(NextTokenLoss):
    """LongCE: the next-token loss with more weight on tokens that need a long context.

    Fang et al. 2025, arXiv:2410.23771, section 4, as in the authors' finetune.py: a token's weight is
    min(p(token | long context) / p(token | short context), cap), worked out by the trained model in the same step, and
    a constant for the gradient; the paper's cap is 5. Tokens with no more than a short context before them have weight
    1. The weighted losses are divided by the number of tokens, not by the sum of the weights. The value is the plain
    loss, so that runs and lengths can be compared; without gradients it is a NextTokenLoss.

    short_context: how each sequence is read again, without gradients, before each pass: in windows, in which packed
    documents do not see one another. Sequences are whole, without gaps.
    """

    def __init__(self, model: "PreTrainedModel", short_context: ShortContext, cap: float, **options: Any) -> None:
        super().__init__(model, **options)
        self._context, self._cap = short_context, cap

    def _weighting(self, batch: Batch[torch.Tensor]) -> Weighting | None:
        if not torch.is_grad_enabled():
            return None
        short, counts = self._short_losses(batch), batch.document_labels

        def weigh(losses: torch.Tensor, chunk: slice) -> torch.Tensor:
            weights = (short[:, chunk] - losses.detach()).clamp(max=math.log(self._cap)).exp()
            weights = torch.where(short[:, chunk].isnan(), 1.0, weights)
            return weights if counts is None else weights / counts[:, chunk]

        return weigh

    @torch.no_grad()
    def _short_losses(self, batch: Batch[torch.Tensor]) -> torch.Tensor:
        """Loss of each label with a short context, nats, shape (batch, tokens); NaN where all of it is short.

        Reads the same windows whatever the documents are, since processes that share weights read together.
        """
        ids, positions = batch.ids, batch.positions if batch.packed else None
        losses = torch.full(ids.shape, math.nan, device=ids.device)
        first = self._context.tokens - 1
        for start, stop in self._context.windows(ids.shape[1]):
            part = None if positions is None else _from_zero(positions[:, start:stop])
            outputs = self.hidden(ids[:, start:stop], part, packed=part is not None)
            scored = slice(start + first, stop - 1)
            with torch.autocast(ids.device.type, enabled=False):
                hidden = outputs.last_hidden_state[:, first:-1].to(self.split.head.weight.dtype)
                parts = [
                    self._losses(outputs, hidden[:, chunk], batch.labels[:, scored][:, chunk])
                    for chunk in self._chunks(hidden)
                ]
            losses[:, scored] = torch.cat(parts, dim=1)
            if positions is not None:  # a document that begins within the window is read whole
                whole = positions[:, scored] <= torch.arange(first, stop - 1 - start, device=ids.device)
                losses[:, scored] = losses[:, scored].masked_fill(whole, math.nan)
        return losses


def _from_zero(positions: torch.Tensor) -> torch.Tensor:
    """The positions of a part of packed documents, whose first document may have begun before it."""
    restarts = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    return torch.where(restarts.cumsum(1) > 0, positions, positions - positions[:, :1])


def _weighted_sum(losses: torch.Tensor, weigh: Weighting, chunk: slice) -> torch.Tensor:
    """The sum of the losses, with the gradient of the weighted sum: the value does not depend on the weights."""
    weighted = (weigh(losses, chunk) * losses).sum()
    return losses.detach().sum() + (weighted - weighted.detach())


def _suits_liger(hidden: torch.Tensor) -> bool:
    return hidden.device.type == "cuda" and find_spec("liger_kernel") is not None


@contextmanager
def explain_out_of_memory(what: str, remedy: str) -> Iterator[None]:
    """Raise RopecliError with `what` and `remedy` if a device runs out of memory inside the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RopecliError(f"{what} does not fit in device memory. {remedy}") from error


def enable_checkpointing(model: Any) -> None:
    """Recompute layers in the backward pass. transformers is renaming this method; its old name warns."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def small_loss(config: Any, attn: str) -> NextTokenLoss:
    """The loss of a small model of the same architecture with random weights, on the CPU. Raises CheckpointError.

    attn: of the recipe. Flash attention, which runs only on a GPU, is replaced.
    """
    model, _ = make_small_model(config)
    if attn == "auto" or "flash" in attn:
        attn = "sdpa" if model._supports_sdpa else "eager"
    model.set_attn_implementation(attn)
    return NextTokenLoss(model)


@torch.no_grad()
def prove_positions(loss_of: NextTokenLoss, positions: str, packed: bool) -> None:
    """Check that a model follows gaps and restarts in position_ids.

    transformers finds the boundaries of packed documents by position_ids, and only some models and attention
    implementations support it; others would silently train something else. Reads sixteen tokens with a gap, or a
    restart, in the middle. positions: the recipe's key. Raises RecipeError if a gap changes nothing or blocks
    attention, or if a restart does not block it.
    """
    name = type(loss_of.model).__name__

    def states(start: int, *, packed: bool = False, changed: bool = False) -> torch.Tensor:
        """Shape (tokens, width). start: the position after the middle. changed: whether a token before it is."""
        ids = probe_ids(loss_of.model, 2 * _HALF)
        if changed:
            ids[0, _HALF - 2] = 0
        at = torch.tensor([[*range(_HALF), *range(start, start + _HALF)]], device=ids.device)
        return loss_of.hidden(ids, at, packed).last_hidden_state[0]

    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        """Up to rounding, which differs when experts get other batches of tokens."""
        return bool((one - other).abs().max() <= _ROUNDINGS * torch.finfo(one.dtype).eps * one.abs().max())

    def is_blocked(start: int, *, packed: bool) -> bool:
        """Whether no state after the middle changes with a token before it."""
        return same(states(start, packed=packed)[_HALF:], states(start, packed=packed, changed=True)[_HALF:])

    gap = _HALF + _GAP
    with in_evaluation(loss_of):  # without dropout
        if packed and not is_blocked(0, packed=True):
            raise RecipeError(
                f"{name} lets packed documents attend to one another. Use --sequences long or concat, or another attn."
            )
        if positions != "full" and same(states(_HALF), states(gap)):
            raise RecipeError(
                f"{name} ignores position_ids, which --positions {positions} needs. Use --positions full."
            )
        if positions != "full" and is_blocked(gap, packed=False):
            raise RecipeError(
                f"{name} treats gaps in the positions as document boundaries, so it cannot train with --positions "
                f"{positions}. Try another attn."
            )
