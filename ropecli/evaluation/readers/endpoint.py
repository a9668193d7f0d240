"""Reads samples with a server (see evaluation/completions.py): what it was started with is what is measured."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ropecli.errors import CheckpointError, MethodError
from ropecli.evaluation.completions import Endpoint
from ropecli.evaluation.protocols import Window
from ropecli.evaluation.readers.reader import PromptAndAnswers, Reader
from ropecli.evaluation.subject import ReaderFactory, Subject
from ropecli.messages import warn


class EndpointReader(Reader):
    """A server that takes prompts of token ids, so that no token is added to them.

    tokenizer: gives the ids of generated text. in_flight: requests at the same time. Raises EndpointError in every
    method.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: Any, *, in_flight: int) -> None:
        self.endpoint, self.tokenizer, self.in_flight = endpoint, tokenizer, in_flight
        self._lock = threading.Lock()

    def prepare(
        self, longest: np.ndarray, length: int, largest: int = 0, *, answers: bool = False, losses: bool = True
    ) -> None:
        self.gives_losses = self.endpoint.gives_prompt_losses(longest.tolist())
        most = self.endpoint.model.max_length
        if losses and length == most and self.gives_losses and not self.endpoint.forces_exactly(longest.tolist()):
            most -= 1  # it always generates a token
        if most is not None and length > most:
            raise MethodError(f"{self.endpoint.url} reads up to {most} tokens; the longest sample needs {length}.")

    def properties(self) -> dict[str, Any]:
        device = f"{self.endpoint.engine} at {self.endpoint.url}"
        return {"dtype": "as served", "device": device, "follows_length": False, "cache_is_exact": False, "chunk": None}

    def task_lock(self) -> AbstractContextManager[Any]:
        return self._lock

    @contextlib.contextmanager
    def _waiting(self, tokens: int) -> Iterator[None]:
        """While the server reads these tokens, another thread has the lock."""
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
        self.advance(tokens)

    def losses(self, windows: Iterable[Window]) -> Iterator[np.ndarray]:
        for window in windows:
            with self._waiting(window.read):
                values = self.endpoint.prompt_losses(window.ids.tolist())
            yield np.array(values[len(values) - window.targets :])

    def log_probabilities(self, questions: Iterable[PromptAndAnswers]) -> Iterator[np.ndarray]:
        """Sends the prompt once per answer."""
        for ids, answers in questions:
            values = []
            for answer in answers:
                with self._waiting(round(len(ids) / len(answers))):
                    losses = self.endpoint.prompt_losses([*ids.tolist(), *answer])
                values.append(-sum(losses[len(losses) - len(answer) :]))
            yield np.array(values)

    def generate(
        self, prompts: Sequence[np.ndarray], limit: int, done: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        """The ids of the text that the server generates, without special tokens."""
        answers = []
        for ids in prompts:
            most = self.endpoint.model.max_length or len(ids) + limit
            with self._waiting(len(ids)):
                text = self.endpoint.complete(ids.tolist(), max_tokens=min(limit, most - len(ids)))["text"]
            answers.append(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return answers


class EndpointReaderFactory(ReaderFactory):
    """Opens the reader of a server, which serves one checkpoint."""

    loads_weights = False

    def __init__(self, endpoint: Endpoint, *, in_flight: int) -> None:
        self.endpoint, self.in_flight = endpoint, in_flight

    def request(self) -> dict[str, Any]:
        model = self.endpoint.model
        return {"engine": self.endpoint.engine, "served": model.name, "served_length": model.max_length}

    def check(self, subjects: Sequence[Subject]) -> None:
        if len({id(subject.checkpoint) for subject in subjects}) > 1 or any(subject.plan for subject in subjects):
            raise MethodError(
                "A server has one checkpoint, and the scaling that it was started with. Patch a folder, serve it, and "
                "measure it alone and without --methods; in compare: --methods as-is."
            )

    @contextlib.contextmanager
    def open(self, subject: Subject, tokenizer: Any, scalings: Sequence[Subject] = ()) -> Iterator[EndpointReader]:
        """Raises CheckpointError for another tokenizer's ids."""
        self._refuse_other_ids(tokenizer, subject.checkpoint.name)
        yield EndpointReader(self.endpoint, tokenizer, in_flight=self.in_flight)

    def _refuse_other_ids(self, tokenizer: Any, name: str) -> None:
        text = "The key is 48205; café №7.\n\n\tdef f(x):  return x"
        known = self.endpoint.tokenize(text)
        if known is None:
            warn(f"{self.endpoint.url} does not tell its tokenizer's ids: make sure that it serves {name}.")
        elif known != tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise CheckpointError(f"The tokenizer of {self.endpoint.url} is not that of {name}.")
