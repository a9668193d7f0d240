"""One prompt of exactly N tokens, its answer included: special tokens, introduction, text with needles, question.

Every piece is tokenized by itself, so that the tokens of a needle are whole and its place is exact; the text between
is cut between two tokens. Pure: the same task, length, depth and seed give the same prompt to every model with the
same tokenizer.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from ropecli.errors import DataError
from ropecli.evaluate.retrieval.haystack import Haystack
from ropecli.evaluate.retrieval.keys import draw_keys
from ropecli.evaluate.retrieval.pieces import Pieces, Tokens, common_beginning
from ropecli.evaluate.retrieval.templates import Templates

_DEPTH_STEPS = 10**6


@dataclass(frozen=True)
class Task:
    """name: passkey or needle. keys: needles in a prompt, of which one is asked for. candidates: answers to rank, the
    true key and those of the other needles among them.
    """

    name: str
    templates: Templates
    haystack: Haystack
    pieces: Pieces
    keys: int = 1
    candidates: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        self.templates.check_keys(self.keys)
        if self.candidates <= self.keys:
            raise DataError(
                f"{self.candidates} candidates leave none that is not in the text beside {self.keys} keys; there must "
                f"be at least {self.keys + 1}."
            )

    def prompt(self, length: int, depth: float, trial: int) -> "Prompt":
        """Raises DataError for a length that has no room for needles and question, saying what they need."""
        seed = (self.seed, length, round(depth * _DEPTH_STEPS), trial)
        return _Draft(self, np.random.default_rng(seed), length, depth).finish()


@dataclass(frozen=True)
class Prompt:
    """ids: shape (tokens,), int64, without the answer. keys: the candidates' texts, the true key first.

    answers: their tokens as they follow ids, so that ids and the first answer are `length` tokens together. needle: the
    first position of the needle that is asked for.
    """

    ids: np.ndarray
    keys: tuple[str, ...]
    answers: tuple[Tokens, ...]
    needle: int

    def fingerprint(self) -> bytes:
        """sha256 of the prompt and its answers."""
        rows = [self.ids, *(np.array(answer) for answer in self.answers)]
        return hashlib.sha256(b"|".join(row.astype("<i8").tobytes() for row in rows)).digest()


class _Draft:
    """A prompt in the making."""

    def __init__(self, task: Task, rng: np.random.Generator, length: int, depth: float) -> None:
        self.task = task
        self.length = length
        self.depth = depth
        pieces, templates = task.pieces, task.templates
        order = rng.permutation(len(templates.names))[: task.keys]
        self.names = [templates.names[index] for index in order]
        self.line = templates.question_line(self.names[0])
        introduction = f"{templates.introduction}\n" if templates.introduction else ""
        self.head = pieces.prefix + pieces.opening(introduction)
        # drawn before the text is cut to size: keys that stand nowhere in it stand in no part of it
        self.text = task.haystack.stretch(length, rng)
        self.keys = draw_keys(rng, task.candidates, pieces.text(self.text), lambda key: len(self._completed(key)))

    def _completed(self, key: str) -> Tokens:
        return self.task.pieces.inside(self.line + key)

    def finish(self) -> Prompt:
        completed = [self._completed(key) for key in self.keys]
        # where a tokenizer joins the end of the question with a key, that token is the answer's
        asked = common_beginning([self.task.pieces.inside(self.line), *completed])
        answers = tuple(one[asked:] for one in completed)
        needles = self._needles()
        fixed = len(self.head) + sum(len(tokens) for _, tokens in needles) + len(completed[0])
        if fixed > self.length:
            raise DataError(
                f"A prompt of {self.length} tokens is too short: its words alone take {fixed} tokens. Give --lengths "
                f"of at least {fixed}."
            )
        ids, at = self._weave(needles, self.text[: self.length - fixed])
        ids = np.concatenate([ids, np.array(completed[0][:asked], dtype=np.int64)])
        return Prompt(ids, self.keys, answers, at)

    def _needles(self) -> list[tuple[float, Tokens]]:
        """(depth, tokens) of each: first the one that is asked for; the others spread evenly inside the text."""
        others = self.task.keys - 1
        depths = [self.depth, *((index + 0.5) / others for index in range(others))]
        lines = [self.task.templates.needle_line(*pair) for pair in zip(self.names, self.keys, strict=False)]
        return [(depth, self.task.pieces.inside(line)) for depth, line in zip(depths, lines, strict=True)]

    def _weave(self, needles: list[tuple[float, Tokens]], text: np.ndarray) -> tuple[np.ndarray, int]:
        """The head and the text with its needles; and where the needle stands that is asked for."""
        ids, at, read = list(self.head), 0, 0
        for depth, needle in sorted(needles, key=lambda pair: pair[0]):
            cut = round(depth * len(text))
            ids += text[read:cut].tolist()
            read = cut
            if needle is needles[0][1]:
                at = len(ids)
            ids += needle
        ids += text[read:].tolist()
        return np.array(ids, dtype=np.int64), at
