"""Reads samples with a model in this process. Logits exist only for scored tokens, one chunk at a time.

An answer continues from the KV cache of its prompt, and long samples are read in chunks through it, if a check on the
longest sample shows that this gives the losses of a single pass.
"""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ropecli.errors import DataError, RopecliError
from ropecli.evaluation.protocols import Window
from ropecli.evaluation.readers.reader import PromptAndAnswers, Reader, batches
from ropecli.live.devices import device_names, input_device
from ropecli.live.lm_head import SplitModel
from ropecli.live.loading import is_quantized
from ropecli.live.rotary import reset_tables, varying_tables
from ropecli.live.skeleton import decoder_layers
from ropecli.messages import warn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LONG = 32_768
_CHUNK_OF_LONG = 1024
_LOGITS_AT_ONCE = 2**22
"""Elements in one chunk of logits: 16 MiB in float32, several times that while they are reduced."""
_LOGITS_AT_ONCE_OFFLOADED = 2**28
"""With an offloaded head, whose weights are loaded for each chunk: 1 GiB."""
_PROBED = 256
"""Default chunk size of the check, tokens."""
_CHUNKS_PROBED = 2.5
"""The last one is partial."""
_LEAST_PROBED = 64
_COPIED_AT_ONCE = 2**31
"""Bytes of KV cache for one batch of answers."""
_TOKENS_AT_ONCE = 2**14
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
"""Config fields for the number of tokens after which a cache may drop keys."""
_SAME, _SAME_ANYWHERE = 1e-4, 5e-3
_ROUNDED = 6e-2
"""Allowed difference between chunked and one-pass losses, nats: mean and maximum in full precision, mean in half.

SmolLM2-135M in bfloat16 has 0.04 with an exact cache, 0.07 to 0.15 with positions wrong by 8 to 64, and 0.9 to 1.6 with
a cache that drops keys.
"""


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


class LiveReader(Reader):
    """A causal LM that reads. Call `prepare` before anything else.

    chunk: tokens per decoder pass, with earlier ones in the KV cache; None for all up to 32,768 tokens, else 1,024; 0
    for all. batch_size: windows or prompts per pass. follows_length: whether a patch in memory makes the frequencies
    depend on the length; `prepare` adds those of the model's own tables. cache_is_exact: whether
    reading in chunks and continuing from the cache give the losses of one pass.
    """

    def __init__(
        self, model: "PreTrainedModel", *, chunk: int | None = None, batch_size: int = 1, follows_length: bool = False
    ) -> None:
        self.model, self.batch_size = model, batch_size
        self.split = SplitModel(model)
        self.device = input_device(model)
        self.cache_is_exact = False
        self.follows_length = follows_length
        self._chosen_chunk, self._patch_follows = chunk, follows_length
        self._dynamic_tables: list[Any] = []

    def prepare(
        self, longest: np.ndarray, length: int, largest: int = 0, *, answers: bool = False, losses: bool = True
    ) -> None:
        """Check the KV cache on the longest sample, if chunks or answers need it. If it fails, reads in one pass.

        Arguments: see Reader. Raises DataError for an id outside the vocabulary.
        """
        refuse_unknown_ids(max(largest, int(longest.max(initial=0))), self.model)
        self._dynamic_tables = varying_tables(self.model, length)
        self.follows_length = self._patch_follows or bool(self._dynamic_tables)
        self.chunk = self._chosen_chunk or None
        if self._chosen_chunk is None and length > _LONG:
            self.chunk = _CHUNK_OF_LONG
        in_chunks = self.chunk is not None and len(longest) > self.chunk
        self.cache_is_exact = False
        if (in_chunks or answers) and not self.follows_length:
            with within_memory(1, len(longest)):
                self.cache_is_exact = self._check_cache(self._tensor(longest), answers)
        if (in_chunks or answers) and not self.cache_is_exact:
            reason = "the model's KV cache changes the losses"
            if self.follows_length:
                reason = "the model's frequencies depend on the length"
            if in_chunks:
                warn(f"Reading in one pass instead of chunks of {self.chunk} tokens: {reason}.")
            if answers:
                warn(f"Reading the whole prompt again for each token of an answer, which is slow: {reason}.")

    def dtype_and_device(self) -> tuple[str, str]:
        return str(self.model.dtype).removeprefix("torch."), device_names(self.model)

    @contextlib.contextmanager
    def watched(self, advance: Callable[[float], None]) -> Iterator[None]:
        """A layer reads its share of the tokens."""
        layers = decoder_layers(self.model)

        def passed(layer: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(inputs[0], torch.Tensor):
                advance(inputs[0].shape[:-1].numel() / len(layers))

        handles = [layer.register_forward_hook(passed) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def losses(self, windows: Iterable[Window]) -> Iterator[np.ndarray]:
        """Windows of one length share a pass."""
        for group in batches(windows, lambda window: len(window.ids), self.batch_size):
            ids = torch.from_numpy(np.stack([window.ids for window in group])).to(self.device)
            targets = max(window.targets for window in group)
            with within_memory(*ids.shape):
                losses = self.nll(ids, targets).cpu().double().numpy()
            for window, nll in zip(group, losses, strict=True):
                yield nll[targets - window.targets :]

    def log_probabilities(self, questions: Iterable[PromptAndAnswers]) -> Iterator[np.ndarray]:
        """Reads each prompt once if possible."""
        for ids, answers in questions:
            refuse_unknown_ids(max(int(ids.max()), *(max(answer) for answer in answers)), self.model)
            values = np.empty(len(answers))
            with within_memory(1, len(ids)), torch.inference_mode():
                outputs = self._read(self._tensor(ids)) if self.cache_is_exact else None
                for length in dict.fromkeys(map(len, answers)):
                    members = [index for index, answer in enumerate(answers) if len(answer) == length]
                    rows = torch.tensor([answers[index] for index in members], device=self.device)
                    sums = self._on_cache(outputs, rows) if self.cache_is_exact else self._whole(ids, rows)
                    values[members] = sums.cpu().double().numpy()
            yield values

    def generate(
        self, prompts: Sequence[np.ndarray], limit: int, done: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        """Adjoining prompts of equal length share a pass."""
        answers: list[list[int]] = [[] for _ in prompts]
        config = self.model.generation_config
        end = config.eos_token_id if config else None
        ends = {end} if isinstance(end, int) else {*(end or ())}
        for group in batches(range(len(prompts)), lambda index: len(prompts[index]), self.batch_size):
            ids = np.stack([prompts[index] for index in group])
            refuse_unknown_ids(int(ids.max()), self.model)
            unfinished = set(group)
            with within_memory(*ids.shape), torch.inference_mode():
                for chosen in islice(self._greedy(ids), limit):
                    for index, token in zip(group, chosen.tolist(), strict=True):
                        if index not in unfinished:
                            continue
                        if token not in ends:
                            answers[index].append(token)
                        if token in ends or done(index, answers[index]):
                            unfinished.remove(index)
                    if not unfinished:
                        break
        return answers

    @torch.inference_mode()
    def nll(self, ids: torch.Tensor, targets: int | None = None, chunk: int | None = None) -> torch.Tensor:
        """-ln p(ids[t] | ids[:t]) of the last `targets` tokens; by default of all except the first.

        ids: shape (batch, tokens). chunk: default: that of `prepare`. Returns shape (batch, targets), nats, float32.
        """
        tokens = ids.shape[1]
        first = 1 if targets is None else tokens - targets
        chunk = self.chunk if chunk is None and self.cache_is_exact else chunk
        parts = []
        for start, outputs in self.decode(ids, chunk):
            hidden = outputs.last_hidden_state
            low, high = max(first - 1 - start, 0), min(tokens - 1 - start, hidden.shape[1])
            if low < high:
                parts.append(self.score(outputs, hidden[:, low:high], ids[:, start + low + 1 : start + high + 1]))
        return torch.cat(parts, dim=1)

    def decode(self, ids: torch.Tensor, chunk: int | None) -> Iterator[tuple[int, Any]]:
        """Yield (position of the first token, decoder output) of each chunk. ids: shape (batch, tokens)."""
        reset_tables(self._dynamic_tables)
        if chunk is None or ids.shape[1] <= chunk:
            yield 0, self.split.decode(ids)
            return
        cache: Any = None
        for start in range(0, ids.shape[1], chunk):
            outputs = self.split.decode_on(ids[:, start : start + chunk], cache)
            cache = outputs.past_key_values
            yield start, outputs

    def score(self, outputs: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """-ln p of each target. hidden: shape (batch, targets, width). targets, result: shape (batch, targets)."""
        most = _LOGITS_AT_ONCE_OFFLOADED if self.split.head.weight.is_meta else _LOGITS_AT_ONCE
        step = max(1, most // (self.split.vocabulary * len(targets)))
        parts = []
        for start in range(0, hidden.shape[1], step):
            logits = self.split.logits(outputs, hidden[:, start : start + step])
            chosen = logits.gather(-1, targets[:, start : start + step, None].to(logits.device))[..., 0]
            parts.append(logits.logsumexp(-1) - chosen)
        return torch.cat(parts, dim=1)

    def _greedy(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Yield greedily decoded tokens, shape (batch,), without end. ids: shape (batch, tokens)."""
        tokens = torch.from_numpy(ids).to(self.device)
        outputs: Any = self._read(tokens) if self.cache_is_exact else None
        while True:
            if not self.cache_is_exact:
                reset_tables(self._dynamic_tables)
                outputs = self.split.decode(tokens)
            chosen = self._next_logits(outputs).argmax(-1, keepdim=True).to(self.device)
            yield chosen[:, 0].cpu().numpy()
            if self.cache_is_exact:
                outputs = self.split.decode_on(chosen, outputs.past_key_values)
            else:
                tokens = torch.cat([tokens, chosen], dim=1)

    def _tensor(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(ids)[None].to(self.device)

    def _read(self, tokens: torch.Tensor) -> Any:
        """The decoder's output of the last chunk, with the KV cache of all."""
        outputs, cache = None, None
        for part in tokens.split(self.chunk or tokens.shape[1], dim=1):
            outputs = self.split.decode_on(part, cache)
            cache = outputs.past_key_values
        return outputs

    def _next_logits(self, outputs: Any) -> torch.Tensor:
        """Of the next token; shape (batch, vocabulary)."""
        return self.split.logits(outputs, outputs.last_hidden_state[:, -1:])[:, 0]

    def _on_cache(self, outputs: Any, rows: torch.Tensor) -> torch.Tensor:
        """rows: shape (answers, tokens). Log-probabilities, shape (answers,)."""
        logits, cache = self._next_logits(outputs), outputs.past_key_values
        rows = rows.to(logits.device)
        values = logits[0].log_softmax(-1)[rows[:, 0]]
        if rows.shape[1] == 1:
            return values
        held = [value for layer in cache.layers for value in vars(layer).values()]
        size = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
        parts = []
        for part in rows.split(max(1, _COPIED_AT_ONCE // max(1, size))):
            copied = copy.deepcopy(cache)  # continuing from a cache changes it
            copied.batch_repeat_interleave(len(part))
            continued = self.split.decode_on(part[:, :-1], copied)
            logits = self.split.logits(continued, continued.last_hidden_state)
            parts.append(logits.log_softmax(-1).gather(-1, part[:, 1:, None]).sum(dim=(1, 2)))
        return values + torch.cat(parts)

    def _whole(self, ids: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
        prompt = self._tensor(ids)
        parts = []
        for part in rows.split(max(1, _TOKENS_AT_ONCE // (len(ids) + rows.shape[1]))):
            sequences = torch.cat([prompt.expand(len(part), -1), part], dim=1)
            parts.append(-self.nll(sequences, targets=rows.shape[1]).sum(dim=1))
        return torch.cat(parts)

    @torch.inference_mode()
    def _check_cache(self, ids: torch.Tensor, answers: bool) -> bool:
        """Return whether chunks give the losses of one pass. Some model types use their KV cache incorrectly.

        ids: shape (1, tokens). answers: whether copies of the cache are continued too. Reads only the first chunks,
        enough to fill a sliding window.
        """
        chunk = self.chunk
        try:
            if answers:
                self._on_cache(self.split.decode_on(ids[:, :2], None), ids[:, :2].expand(2, -1))
                chunk = max(1, min(chunk or _PROBED, int(ids.shape[1] / _CHUNKS_PROBED)))
            if chunk is None or ids.shape[1] <= chunk:
                return True
            config = self.model.config.get_text_config()
            windows = [window for name in _WINDOWS if isinstance(window := getattr(config, name, None), int)]
            least = max([_LEAST_PROBED, *(window + chunk for window in windows)])
            ids = ids[:, : max(least, int(_CHUNKS_PROBED * chunk))]
            by_chunks = self.nll(ids, chunk=chunk)
        except Exception:  # models without a KV cache fail in many ways
            return False
        at_once = self.nll(ids)
        if not at_once.isfinite().all():
            return True  # the model overflows either way, which is reported later
        difference = (by_chunks - at_once).cpu().double()
        exact = self.split.head.weight.dtype in (torch.float32, torch.float64)
        if exact and not is_quantized(self.model):
            return difference.abs().mean().item() <= _SAME and difference.abs().max().item() <= _SAME_ANYWHERE
        # rounding errors cancel in the mean; a wrong cache biases it
        bias, error = difference.mean().abs().item(), difference.std().item() / difference.numel() ** 0.5
        return difference.abs().mean().item() <= _ROUNDED and bias <= max(_ROUNDED / 30, 3 * error)
