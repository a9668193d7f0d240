"""Read a prompt once and continue from its KV cache; if that is not exact, read the whole prompt for each answer.

Logits are computed only for the answers, never for the whole prompt.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ropecli.evaluation.retrieval.haystack import TokenIds
from ropecli.evaluation.scoring import TokenScorer, one_pass_message
from ropecli.live.devices import input_device
from ropecli.live.rotary import reset_tables, rotary_tables, switches_with_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PROBED = 256
"""Default chunk size of the check, tokens."""
_PROBED_IN = 2.5
"""Chunks that the check reads; the last one is partial."""
_COPIED_AT_ONCE = 2**31
"""Bytes of KV cache for one batch of answers."""
_TOKENS_AT_ONCE = 2**14


class _Read(NamedTuple):
    """logits: shape (batch, vocabulary), for the next token. cache: KV cache of all tokens read."""

    logits: torch.Tensor
    cache: Any


class PromptReader:
    """Reads prompts with a causal LM.

    longest: tokens of the longest prompt with its answer. switching: whether a patch in memory makes the frequencies
    depend on the length; the model's own tables are always checked. chunk: tokens per pass; None for all. once: whether
    prompts are read once; see `check_cache`.
    """

    def __init__(
        self, model: "PreTrainedModel", longest: int, *, switching: bool = False, chunk: int | None = None
    ) -> None:
        self.score = TokenScorer(model)
        self.split = self.score.split
        self.device = input_device(model)
        self.chunk = chunk
        tables = rotary_tables(model)
        self.dynamic_tables = tables if switches_with_length(tables, longest) else []
        self.switching = switching or bool(self.dynamic_tables)
        self.once = False

    def check_cache(self, ids: np.ndarray, say: Callable[[str], None] = lambda message: None) -> None:
        """Read prompts once from now on if continuing from the KV cache is exact for `ids`.

        say: called with a warning if prompts cannot be read in chunks.
        """
        self.once = not self.switching and self._continues_exactly(ids)
        if not self.once and self.chunk is not None and len(ids) > self.chunk:
            say(one_pass_message(self.chunk, switching=self.switching))

    @torch.inference_mode()
    def log_probabilities(self, ids: np.ndarray, answers: Sequence[TokenIds]) -> np.ndarray:
        """ln p(answer | ids) of each answer; shape (answers,), float64, nats."""
        values = np.empty(len(answers))
        read = self._read(self._tensor(ids)) if self.once else None
        for members in _of_same_length(answers):
            rows = torch.tensor([answers[index] for index in members], device=self.device)
            found = self._on_cache(read, rows) if read else self._whole(ids, rows)
            values[members] = found.cpu().double().numpy()
        return values

    def greedy(self, ids: np.ndarray) -> Iterator[int]:
        """Yield greedily decoded tokens, without end. ids: shape (tokens,)."""
        for chosen in self.greedy_batch(ids[None]):
            yield int(chosen[0])

    @torch.inference_mode()
    def greedy_batch(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield greedily decoded tokens of prompts of the same length, without end.

        ids: shape (batch, tokens). Yields shape (batch,).
        """
        tokens = torch.from_numpy(ids).to(self.device)
        read = self._read(tokens) if self.once else None
        while True:
            logits = read.logits if read else self._last_logits(tokens)
            chosen = logits.argmax(-1, keepdim=True).to(self.device)
            yield chosen[:, 0].cpu().numpy()
            if read:
                read = self._continue(chosen, read.cache)
            else:
                tokens = torch.cat([tokens, chosen], dim=1)

    def _tensor(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids)[None].to(self.device)

    def _read(self, tokens: torch.Tensor) -> _Read:
        read = _Read(torch.empty(0), None)
        for part in tokens.split(self.chunk or tokens.shape[1], dim=1):
            read = self._continue(part, read.cache)
        return read

    def _continue(self, tokens: torch.Tensor, cache: Any) -> _Read:
        outputs = self.split.decode_on(tokens, cache)
        return _Read(self.split.logits(outputs, outputs.last_hidden_state[:, -1:])[:, 0], outputs.past_key_values)

    def _on_cache(self, read: _Read, rows: torch.Tensor) -> torch.Tensor:
        """rows: shape (answers, tokens). Log-probabilities, shape (answers,)."""
        rows = rows.to(read.logits.device)
        values = read.logits[0].log_softmax(-1)[rows[:, 0]]
        if rows.shape[1] == 1:
            return values
        parts = []
        for some in rows.split(max(1, _COPIED_AT_ONCE // max(1, _bytes_of(read.cache)))):
            outputs = self.split.decode_on(some[:, :-1], _copies(read.cache, len(some)))
            logits = self.split.logits(outputs, outputs.last_hidden_state)
            parts.append(logits.log_softmax(-1).gather(-1, some[:, 1:, None]).sum(dim=(1, 2)))
        return values + torch.cat(parts)

    def _whole(self, ids: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
        prompt = self._tensor(ids)
        parts = []
        for some in rows.split(max(1, _TOKENS_AT_ONCE // (len(ids) + rows.shape[1]))):
            reset_tables(self.dynamic_tables)
            sequences = torch.cat([prompt.expand(len(some), -1), some], dim=1)
            parts.append(-self.score(sequences, targets=rows.shape[1]).sum(dim=1))
        return torch.cat(parts)

    def _last_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        reset_tables(self.dynamic_tables)
        outputs = self.split.decode(tokens)
        return self.split.logits(outputs, outputs.last_hidden_state[:, -1:])[:, 0]

    def _continues_exactly(self, ids: np.ndarray) -> bool:
        tokens = self._tensor(ids)
        try:
            self._copies_can_be_read(tokens[:, :2])
        except Exception:  # models without a KV cache fail in many ways
            return False
        self.score.chunk = max(1, min(self.chunk or _PROBED, int(len(ids) / _PROBED_IN)))
        try:
            return self.score.reads_by_chunks_as_at_once(tokens)
        finally:
            self.score.chunk = None

    @torch.inference_mode()
    def _copies_can_be_read(self, tokens: torch.Tensor) -> None:
        self._on_cache(self._read(tokens), tokens.expand(2, -1))


def _of_same_length(answers: Sequence[TokenIds]) -> list[list[int]]:
    """The indices of the answers, grouped by their number of tokens."""
    groups: dict[int, list[int]] = {}
    for index, answer in enumerate(answers):
        groups.setdefault(len(answer), []).append(index)
    return list(groups.values())


def _copies(cache: Any, count: int) -> Any:
    """A copy of the cache for a batch of `count`. Continuing from a cache changes it."""
    copied = copy.deepcopy(cache)
    copied.batch_repeat_interleave(count)
    return copied


def _bytes_of(cache: Any) -> int:
    held = [value for layer in cache.layers for value in vars(layer).values()]
    return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
