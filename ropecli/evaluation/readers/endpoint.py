"""Reads samples with a server (see evaluation/completions.py): what it was started with is what is measured."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.pool import ThreadPool
from typing import Any, TypedDict

import numpy as np

from ropecli.errors import CheckpointError, MethodError
from ropecli.evaluation.completions import Endpoint
from ropecli.evaluation.readers.reader import SequenceReader
from ropecli.evaluation.subject import ReaderFactory, Subject
from ropecli.messages import warn

_READ, _CONTINUED = 8192, 16
"""Tokens of the longest sample by which a model is recognized: read, or generated where a server gives no losses.

Scalings that follow the length, and longrope's long factors, show only in long prompts.
"""
_TOP = 5
_SAME_MODEL = 0.1
"""Mean |Δ ln p| between two answers of one model, nats. Rounding in bfloat16 gives up to 0.05 where tokens are read and
0.08 where they are generated; twice or half the factor of yarn at least 0.15 and 0.23 (SmolLM2-135M).
"""
_HEAD = 8
"""Characters of an answer; rounding may change what follows."""


class Identity(TypedDict):
    """A model's answer to ids. values: ln p by token, at each place that is read or generated. text: the answer."""

    values: list[dict[str, float]]
    text: str


class EndpointReader(SequenceReader):
    """A server that takes prompts of token ids, so that no token is added to them.

    tokenizer: gives the ids of generated text. batch_size: requests at the same time. Raises EndpointError in every
    method.
    """

    def __init__(self, endpoint: Endpoint, tokenizer: Any, *, batch_size: int) -> None:
        self.endpoint, self.tokenizer, self.batch_size = endpoint, tokenizer, batch_size

    def prepare(
        self, longest: np.ndarray, length: int, largest: int = 0, *, answers: bool = False, losses: bool = True
    ) -> None:
        self.gives_losses = self.endpoint.gives_prompt_losses(longest.tolist())
        most = self.endpoint.model.max_length
        if losses and length == most and self.gives_losses and not self.endpoint.forces_exactly(longest.tolist()):
            most -= 1  # it always generates a token
        if most is not None and length > most:
            raise MethodError(f"{self.endpoint.url} reads up to {most} tokens; the longest sample needs {length}.")

    def identity(self, ids: np.ndarray) -> Identity:
        if self.gives_losses:
            losses = self.endpoint.prompt_losses(ids[:_READ].tolist())
            return Identity(values=[{"": -loss} for loss in losses], text="")
        known = max(1, min(_READ, len(ids) - _CONTINUED))
        text, values = self.endpoint.greedy(ids[:known].tolist(), _CONTINUED, _TOP)
        return Identity(values=values, text=text)

    def difference(self, then: Identity, now: Identity) -> str:
        if then["values"] and now["values"]:
            difference = mean_difference(then["values"], now["values"])
            how = (
                f"log-probabilities of the same tokens differ by {difference:.2g} nats; rounding gives less than "
                f"{_SAME_MODEL}"
            )
            same = difference < _SAME_MODEL
        else:
            how = f"it continues the same prompt with {now['text']!r}, not {then['text']!r}"
            same = now["text"][:_HEAD] == then["text"][:_HEAD]
        return "" if same else f"{self.endpoint.url} serves another model or scaling than when this run began: {how}."

    def dtype_and_device(self) -> tuple[str, str]:
        return "as served", f"{self.endpoint.engine} at {self.endpoint.url}"

    def _answers(self, ask: Callable[[np.ndarray], Any], prompts: Iterable[np.ndarray]) -> Iterator[Any]:
        """The server's answers in order; several prompts wait for theirs at the same time."""
        with ThreadPool(self.batch_size) as pool:  # its threads keep no process from ending while they wait
            yield from pool.imap(ask, prompts)

    def sequence_losses(self, sequences: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        return self._answers(lambda ids: np.array(self.endpoint.prompt_losses(ids.tolist())), sequences)

    def generate(
        self, prompts: Sequence[np.ndarray], limit: int, done: Callable[[int, list[int]], bool]
    ) -> list[list[int]]:
        """The ids of the text that the server generates, without special tokens."""

        def ask(ids: np.ndarray) -> str:
            most = self.endpoint.model.max_length or len(ids) + limit
            return self.endpoint.complete(ids.tolist(), max_tokens=min(limit, most - len(ids)))["text"]

        answers = []
        for ids, text in zip(prompts, self._answers(ask, prompts), strict=True):
            self.advance(len(ids))
            answers.append(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return answers


def mean_difference(then: Sequence[dict[str, float]], now: Sequence[dict[str, float]]) -> float:
    """Mean |Δ ln p| of the same tokens, nats. Ends where two answers choose different tokens: later ones read others.

    A token that only one of them names is at most as probable as the least one that the other names.
    """
    differences: list[float] = []
    for before, after in zip(then, now, strict=False):
        floors = min(before.values()), min(after.values())
        differences += [abs(before.get(key, floors[0]) - after.get(key, floors[1])) for key in {*before, *after}]
        if max(before, key=before.__getitem__) != max(after, key=after.__getitem__):
            break
    return sum(differences) / len(differences)


class EndpointReaderFactory(ReaderFactory):
    """Opens the reader of a server, which serves one checkpoint."""

    loads_weights = False

    def __init__(self, endpoint: Endpoint, *, batch_size: int) -> None:
        self.endpoint, self.batch_size = endpoint, batch_size

    def request(self) -> dict[str, Any]:
        return {"engine": self.endpoint.engine, "served": self.endpoint.model.name}

    def check(self, subjects: Sequence[Subject]) -> None:
        if len({id(subject.checkpoint) for subject in subjects}) > 1 or any(subject.plan for subject in subjects):
            raise MethodError(
                "A server has one checkpoint, and the scaling that it was started with. Patch a folder, serve it, and "
                "measure it alone and without --methods; in compare: --methods as-is."
            )

    @contextlib.contextmanager
    def open(self, subject: Subject, tokenizer: Any, scalings: Sequence[Subject] = ()) -> Iterator[EndpointReader]:
        """Raises CheckpointError for another tokenizer's ids."""
        text, name = "The key is 48205; café №7.\n\n\tdef f(x):  return x", subject.checkpoint.name
        known = self.endpoint.tokenize(text)
        if known is None:
            warn(f"{self.endpoint.url} does not tell its tokenizer's ids: make sure that it serves {name}.")
        elif known != tokenizer(text, add_special_tokens=False)["input_ids"]:
            raise CheckpointError(f"The tokenizer of {self.endpoint.url} is not that of {name}.")
        yield EndpointReader(self.endpoint, tokenizer, batch_size=self.batch_size)
