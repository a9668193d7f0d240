"""Split a language model into decoder and head, so that [tokens × vocabulary] logits never exist at once.

The head runs in the model's own forward, which receives the decoder's output. So anything that an architecture does to
its logits (soft caps, scales) is included.
"""

from typing import TYPE_CHECKING, Any

import torch

from ropecli.errors import CheckpointError
from ropecli.live.devices import probe_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBE_TOKENS = 16
_FAR = 1e4


class SplitModel:
    """A language model as decoder and head. Raises CheckpointError if their logits are not those of the whole model.

    like: one of the same architecture, proved already; then no weight of `model` is used. plain_head: whether logits
    are just hidden states times the head's weight.
    """

    def __init__(self, model: "PreTrainedModel", *, like: "SplitModel | None" = None) -> None:
        self.model = model
        self.decoder: Any = _decoder_of(model)
        self.head: Any = model.get_output_embeddings()
        if self.decoder is model or self.head is None:
            raise self._cannot_split()
        self.vocabulary, _ = self.head.weight.shape
        self.plain_head: bool = like.plain_head if like else self._probe()

    def decode(self, ids: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Run the decoder. ids: shape (batch, tokens). Output last_hidden_state: shape (batch, tokens, width).

        inputs: position_ids and attention_mask, as in transformers.
        """
        return self.decoder(input_ids=ids, use_cache=False, **inputs)

    def decode_on(self, ids: torch.Tensor, cache: Any) -> Any:
        """Run the decoder on tokens that follow those in `cache` (None: empty). past_key_values holds all of them."""
        return self.decoder(input_ids=ids, past_key_values=cache, use_cache=True)

    def logits(self, outputs: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits, float32. hidden: shape (batch, any tokens, width), a part of outputs.last_hidden_state."""
        before, outputs.last_hidden_state = outputs.last_hidden_state, hidden
        hooked = vars(self.decoder).get("forward")  # that of Accelerate's hooks, for a model spread over devices
        placeholder = hidden.new_zeros(hidden.shape[:2], dtype=torch.long)
        try:
            # the model's forward applies its head to `outputs` instead of running the decoder
            self.decoder.forward = lambda *args, **kwargs: outputs
            return self.model(input_ids=placeholder, use_cache=False).logits.float()
        finally:
            outputs.last_hidden_state = before
            del self.decoder.forward
            if hooked is not None:
                self.decoder.forward = hooked

    @torch.no_grad()
    def _probe(self) -> bool:
        weight = self.head.weight
        ids = probe_ids(self.model, _PROBE_TOKENS)
        logits = self.model(input_ids=ids, use_cache=False).logits.float()
        outputs = self.decode(ids)
        hidden = outputs.last_hidden_state
        scale = logits.abs().max().clamp_min(1e-6)
        again = self.logits(outputs, hidden).to(logits.device)
        if not torch.allclose(again / scale, logits / scale, atol=1e-2, equal_nan=True):
            raise self._cannot_split()
        if weight.is_meta:  # offloaded
            return False
        # far from zero, where a soft cap has an effect
        hidden = hidden.to(weight.device)
        far = hidden / hidden.abs().max().clamp_min(1e-6) * _FAR
        capped = self.logits(outputs, far)
        # an adapter may train a tied head in a different precision than the decoder
        plain = torch.nn.functional.linear(far.to(weight.dtype), weight).float()
        if getattr(self.head, "bias", None) is not None or not plain.isfinite().all():
            return False
        return torch.allclose(plain, capped, rtol=1e-2, atol=1e-3 * plain.abs().max().item())

    def _cannot_split(self) -> CheckpointError:
        return CheckpointError(f"{type(self.model).__name__}: its LM head cannot run separately from its decoder.")


def _decoder_of(model: "PreTrainedModel") -> Any:
    """The part that the head runs after. In Llama 4, the text part is a causal LM of its own, with a decoder inside."""
    if model.base_model is not model:
        return model.base_model
    if hasattr(model, "model"):
        return model.model
    text = model.get_decoder()
    return model if text is model else _decoder_of(text)
