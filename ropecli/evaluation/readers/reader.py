"""Readers give a task losses, log-probabilities of answers, and answers.

Readers: a model in this process (live.py), vLLM in this process (vllm_reader.py), a server (endpoint.py).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any, TypeVar

import numpy as np

from ropecli.evaluation.protocols import Window

PromptAndAnswers = tuple[np.ndarray, Sequence[Sequence[int]]]
"""The ids of a prompt, shape (tokens,), and of each answer."""
_T = TypeVar("_T")


class Reader:
    """Reads samples. Call `prepare` before anything else.

    batch_size: samples per call. mixes_lengths: whether those of several lengths share a call. follows_length: whether
    frequencies depend on the length, so that every length needs a pass of its own. chunk: tokens per pass; None for
    all. gives_losses: whether it gives the log-probabilities of given tokens, or only answers. advance: called with the
    tokens that were read.
    """

    batch_size = 1
    mixes_lengths = False
    follows_length = False
    chunk: int | None = None
    gives_losses = True
    advance: Callable[[float], None] = staticmethod(lambda tokens: None)

    def prepare(
        self, longest: np.ndarray, length: int, largest: int = 0, *, answers: bool = False, losses: bool = True
    ) -> None:
        """Check that the samples can be read.

        longest: ids, shape (tokens,). length: of the longest sample with its answer, tokens. largest: of all ids.
        answers: whether prompts are continued. losses: whether given tokens are scored. Raises RopecliError.
        """
        raise NotImplementedError

    def identity(self, ids: np.ndarray) -> Any:
        """The model's answer to these ids, as JSON, to recognize it later; None if the request names its weights."""
        return None

    def difference(self, then: Any, now: Any) -> str:
        """A sentence if these identities are of different models; else empty."""
        return ""

    def dtype_and_device(self) -> tuple[str, str]:
        """For the report."""
        raise NotImplementedError

    @contextlib.contextmanager
    def watched(self, advance: Callable[[float], None]) -> Iterator[None]:
        """Call `advance` in the `with` block with the tokens read since its last call."""
        self.advance = advance
        try:
            yield
        finally:
            del self.advance

    def losses(self, windows: Iterable[Window]) -> Iterator[np.ndarray]:
        """-ln p of each window's targets, shape (targets,), nats, float64."""
        raise NotImplementedError

    def log_probabilities(self, questions: Iterable[PromptAndAnswers]) -> Iterator[np.ndarray]:
        """ln p(answer | prompt) of each answer, shape (answers,), float64, nats."""
        raise NotImplementedError

    def generate(
        self, prompts: Sequence[np.ndarray], limit: int, done: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        """Greedy answers: up to `limit` tokens, up to an end token, or until `done`.

        prompts: ids, shape (tokens,) each. done: called with the index of a prompt and its answer after each token;
        only saves time.
        """
        raise NotImplementedError


class SequenceReader(Reader):
    """A reader that gives the losses of whole sequences, up to `batch_size` at the same time."""

    mixes_lengths = True

    def sequence_losses(self, sequences: Sequence[np.ndarray]) -> Iterable[np.ndarray]:
        """-ln p of each token but the first, shape (tokens - 1,), nats, in order. sequences: ids, shape (tokens,)."""
        raise NotImplementedError

    def losses(self, windows: Iterable[Window]) -> Iterator[np.ndarray]:
        for group in batches(windows, lambda window: None, self.batch_size):
            read = self.sequence_losses([window.ids for window in group])
            for window, losses in zip(group, read, strict=True):
                self.advance(len(window.ids))
                yield losses[len(losses) - window.targets :]

    def log_probabilities(self, questions: Iterable[PromptAndAnswers]) -> Iterator[np.ndarray]:
        """Reads each prompt once per answer."""
        for ids, answers in questions:
            read = self.sequence_losses([np.append(ids, answer) for answer in answers])
            yield np.array(
                [-losses[len(losses) - len(answer) :].sum() for losses, answer in zip(read, answers, strict=True)]
            )
            self.advance(len(ids))


def batches(items: Iterable[_T], shape: Callable[[_T], Any], size: int) -> Iterator[list[_T]]:
    """Batches of up to `size` adjoining items of equal shape."""
    for _, same in groupby(items, key=shape):
        while batch := list(islice(same, size)):
            yield batch
