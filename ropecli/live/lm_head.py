"""A causal LM taken apart at its head, so that [tokens × vocabulary] logits need never exist at once.

The head runs through the model's own forward, with the decoder's output handed to it: whatever an
architecture does to its logits (caps, scales) is done here too.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ropecli.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 16
_FAR = 1e4


class SplitModel:
    """A causal LM as decoder and head. Raises CheckpointError where the two together are not the whole.

    plain_head: logits are hidden states times the head's weight, and nothing else.
    """

    def __init__(self, model: "PreTrainedModel") -> None:
        self.model = model
        self.decoder: Any = model.base_model if model.base_model is not model else getattr(model, "model", model)
        self.head: Any = model.get_output_embeddings()
        if self.decoder is model or self.head is None:
            raise self._does_not_come_apart()
        self.vocabulary, _ = self.head.weight.shape
        self.plain_head = self._probe()

    def decode(self, ids: torch.Tensor, **others: torch.Tensor) -> Any:
        """ids: shape (batch, tokens). The decoder's output; last_hidden_state: shape (batch, tokens, width).

        others: position_ids and attention_mask, as transformers takes them.
        """
        return self.decoder(input_ids=ids, use_cache=False, **others)

    def decode_on(self, ids: torch.Tensor, cache: Any) -> Any:
        """Like decode, for tokens after those in `cache` (None for none); the output's past_key_values hold all."""
        return self.decoder(input_ids=ids, past_key_values=cache, use_cache=True)

    def logits(self, outputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: shape (batch, some tokens, width), a part of outputs.last_hidden_state. Logits, float32."""
        before, outputs.last_hidden_state = outputs.last_hidden_state, hidden
        placeholder = hidden.new_zeros(hidden.shape[:2], dtype=torch.long)
        try:
            with self._decoder_gives(outputs):
                return self.model(input_ids=placeholder, use_cache=False).logits.float()
        finally:
            outputs.last_hidden_state = before

    @contextlib.contextmanager
    def _decoder_gives(self, outputs: Any) -> Iterator[None]:
        """The model's forward then applies its head to `outputs` in place of running the decoder again."""
        self.decoder.forward = lambda *args, **kwargs: outputs
        try:
            yield
        finally:
            del self.decoder.forward

    @torch.no_grad()
    def _probe(self) -> bool:
        weight = self.head.weight
        ids = torch.arange(_PROBE_TOKENS, device=weight.device)[None] % self.vocabulary
        whole = self.model(input_ids=ids, use_cache=False).logits.float()
        outputs = self.decode(ids)
        hidden = outputs.last_hidden_state
        self._check_equal(outputs, hidden, whole)
        # far from zero, where a cap that does not show yet does
        far = hidden / hidden.abs().max().clamp_min(1e-6) * _FAR
        capped = self.logits(outputs, far)
        # an adapter may train a tied head in another precision than the decoder's
        plain = torch.nn.functional.linear(far.to(weight.dtype), weight).float()
        if getattr(self.head, "bias", None) is not None or not plain.isfinite().all():
            return False
        return torch.allclose(plain, capped, rtol=1e-2, atol=1e-3 * plain.abs().max().item())

    def _check_equal(self, outputs: Any, hidden: torch.Tensor, whole: torch.Tensor) -> None:
        scale = whole.abs().max().clamp_min(1e-6)
        if not torch.allclose(self.logits(outputs, hidden) / scale, whole / scale, atol=1e-2, equal_nan=True):
            raise self._does_not_come_apart()

    def _does_not_come_apart(self) -> CheckpointError:
        return CheckpointError(f"{type(self.model).__name__} does not let its head run apart from its decoder.")
