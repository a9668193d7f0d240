"""The negative log-likelihood of every token in one pass, without [tokens × vocabulary] logits.

The decoder runs once; the head runs chunk by chunk over its output, through the model's own forward, so that
whatever an architecture does to its logits (caps, scales) is done here too.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from ropecli.errors import CheckpointError

_LOGITS_AT_ONCE = 2**24
"""Numbers in one chunk of logits: 64 MiB in float32."""
_PROBE_TOKENS = 16


class TokenScorer:
    """Scores sequences with `model`. Raises CheckpointError where the chunked head does not equal the plain one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.decoder = model.base_model
        self.vocabulary = model.get_output_embeddings().weight.shape[0]
        self.chunk = max(1, _LOGITS_AT_ONCE // self.vocabulary)
        self._check()

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: shape (batch, tokens). Returns shape (batch, tokens - 1), nats, float32: -ln p(ids[t] | ids[:t])."""
        outputs = self.decoder(input_ids=ids, use_cache=False)
        targets = ids[:, 1:]
        hidden = outputs.last_hidden_state[:, :-1]
        parts = []
        step = max(1, self.chunk // len(ids))
        for start in range(0, hidden.shape[1], step):
            outputs.last_hidden_state = hidden[:, start : start + step]
            part = targets[:, start : start + step]
            with self._decoder_gives(outputs):
                logits = self.model(input_ids=part, use_cache=False).logits
            parts.append(cross_entropy(logits.float().flatten(0, 1), part.flatten(), reduction="none").view(part.shape))
        return torch.cat(parts, dim=1)

    @contextlib.contextmanager
    def _decoder_gives(self, outputs: object) -> Iterator[None]:
        """The model's forward then applies its head to `outputs` in place of running the decoder again."""
        self.decoder.forward = lambda *args, **kwargs: outputs
        try:
            yield
        finally:
            del self.decoder.forward

    @torch.inference_mode()
    def _check(self) -> None:
        device = self.model.get_output_embeddings().weight.device
        ids = torch.arange(_PROBE_TOKENS, device=device)[None] % self.vocabulary
        logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        plain = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        if not torch.allclose(self(ids).flatten(), plain, rtol=1e-2, atol=1e-2, equal_nan=True):
            raise CheckpointError(f"{type(self.model).__name__} does not let its head run apart from its decoder.")
