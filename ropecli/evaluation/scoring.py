"""Negative log-likelihood of tokens. The LM head runs in chunks; the decoder optionally does too."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ropecli.errors import DataError, RopecliError
from ropecli.live.lm_head import SplitModel
from ropecli.live.loading import is_quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOGITS_AT_ONCE = 2**22
"""Elements in one chunk of logits: 16 MiB in float32, several times that while they are reduced."""
_LOGITS_AT_ONCE_OFFLOADED = 2**28
"""With an offloaded head, whose weights are loaded for each chunk: 1 GiB."""
_CHUNKS_PROBED = 2.5
_LEAST_PROBED = 64
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
"""Config fields for the number of tokens after which a cache may drop keys."""
_SAME, _SAME_ANYWHERE = 1e-4, 5e-3
_ROUNDED = 3e-2
"""Allowed difference between chunked and one-pass losses, nats: mean and maximum in full precision, mean in half."""


@contextlib.contextmanager
def within_memory(sequences: int, tokens: int) -> Iterator[None]:
    """Raise RopecliError if the device runs out of memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        remedy = "--batch-size" if sequences > 1 else "--chunk, such as 256"
        raise RopecliError(f"Out of memory for {sequences} × {tokens} tokens. Use a smaller {remedy}.") from error


def refuse_unknown_ids(largest: int, model: "PreTrainedModel") -> None:
    """Raise DataError for a token id outside the model's vocabulary."""
    vocabulary = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type, union-attr, index]
    if largest >= vocabulary:
        raise DataError(
            f"The tokenizer produced id {largest}; the model has only ids below {vocabulary}. They do not match."
        )


def one_pass_message(chunk: int, *, switching: bool) -> str:
    """The warning for a model that cannot read in chunks. switching: whether its frequencies depend on the length."""
    reason = "the model's frequencies depend on the length" if switching else "the model's KV cache changes the losses"
    return f"Reading in one pass instead of chunks of {chunk} tokens: {reason}."


class TokenScorer:
    """Scores sequences with a causal LM.

    chunk: tokens per decoder pass, with earlier ones in the KV cache; None for all. It limits memory to the cache and
    one chunk.
    """

    def __init__(self, model: "PreTrainedModel", chunk: int | None = None) -> None:
        self.split = SplitModel(model)
        self.chunk = chunk

    @torch.inference_mode()
    def __call__(self, ids: torch.Tensor, targets: int | None = None, reads_last: bool = True) -> torch.Tensor:
        """-ln p(ids[t] | ids[:t]) of the last `targets` tokens; by default of all except the first.

        ids: shape (batch, tokens). reads_last: whether the decoder also reads the last token. Returns shape (batch,
        targets), nats, float32.
        """
        tokens = ids.shape[1]
        first = 1 if targets is None else tokens - targets
        parts = []
        for start, outputs in self._decode(ids if reads_last else ids[:, :-1]):
            hidden = outputs.last_hidden_state
            low, high = max(first - 1 - start, 0), min(tokens - 1 - start, hidden.shape[1])
            if low < high:
                parts.append(self._score(outputs, hidden[:, low:high], ids[:, start + low + 1 : start + high + 1]))
        return torch.cat(parts, dim=1)

    def reads_by_chunks_as_at_once(self, ids: torch.Tensor) -> bool:
        """Return whether chunks give the same losses as one pass. Some model types use their KV cache incorrectly.

        ids: shape (1, tokens). Reads only the first chunks, enough to fill a sliding window.
        """
        if self.chunk is None or ids.shape[1] <= self.chunk:
            return True
        config = self.split.model.config.get_text_config()
        windows = [window for name in _WINDOWS if isinstance(window := getattr(config, name, None), int)]
        least = max([_LEAST_PROBED, *(window + self.chunk for window in windows)])
        ids = ids[:, : max(least, int(_CHUNKS_PROBED * self.chunk))]
        try:
            by_chunks = self(ids)
        except Exception:  # models without a KV cache fail in many ways
            return False
        chunk, self.chunk = self.chunk, None
        try:
            at_once = self(ids)
        finally:
            self.chunk = chunk
        if not at_once.isfinite().all():
            return True  # the model overflows either way, which is reported later
        difference = (by_chunks - at_once).cpu().double()
        exact = self.split.head.weight.dtype in (torch.float32, torch.float64)
        if exact and not is_quantized(self.split.model):
            return difference.abs().mean().item() <= _SAME and difference.abs().max().item() <= _SAME_ANYWHERE
        # rounding errors cancel in the mean; a wrong cache biases it
        return difference.abs().mean().item() <= _ROUNDED and difference.mean().abs().item() <= _ROUNDED / 30

    def _decode(self, ids: torch.Tensor) -> Iterator[tuple[int, Any]]:
        """Yield (position of the first token, decoder output) of each chunk."""
        if self.chunk is None or ids.shape[1] <= self.chunk:
            yield 0, self.split.decode(ids)
            return
        cache: Any = None
        for start in range(0, ids.shape[1], self.chunk):
            outputs = self.split.decode_on(ids[:, start : start + self.chunk], cache)
            cache = outputs.past_key_values
            yield start, outputs

    def _score(self, outputs: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        most = _LOGITS_AT_ONCE_OFFLOADED if self.split.head.weight.is_meta else _LOGITS_AT_ONCE
        step = max(1, most // (self.split.vocabulary * len(targets)))
        parts = []
        for start in range(0, hidden.shape[1], step):
            logits = self.split.logits(outputs, hidden[:, start : start + step])
            chosen = logits.gather(-1, targets[:, start : start + step, None].to(logits.device))[..., 0]
            parts.append(logits.logsumexp(-1) - chosen)
        return torch.cat(parts, dim=1)
