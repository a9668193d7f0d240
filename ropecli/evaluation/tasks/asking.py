"""Tasks that ask: a prompt of exact length, and the score of the answer.

Mode rank: right and wrong answers are ranked by their log-probability. With n right answers, the score is the share of
them among the best n; a tie counts against them. Works for every causal LM, including small base models.

Mode generate: greedy decoding; the task scores the text. A thought before the answer is generated first, if it is asked
for, and ended; what begins the answer follows it, so that answers of all models are scored alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import numpy as np

from ropecli.errors import RopecliError
from ropecli.evaluation.driver import SampleId, Task, Values
from ropecli.evaluation.prompt_pieces import THOUGHT, THOUGHT_ENDS, Frame, PieceTokenizer, TokenIds
from ropecli.evaluation.readers.reader import Reader
from ropecli.evaluation.report import Cell, score_cell
from ropecli.hashing import digest

_MOST_OF_MARK = 16
"""Tokens that the end of a thought may take."""


@dataclass(frozen=True)
class Question:
    """ids: of the prompt, shape (tokens,). digest: sha256 of prompt and right answers, hexadecimal.

    answers: token ids of the candidates, the right ones first; called only in the mode rank. right: number of right
    ones. limit: maximum tokens to generate. grade: takes the token ids of a generated answer; returns its score, 0 to
    1, and whether the score is final: more tokens cannot change it. lead: text that begins the answer after a thought.
    """

    ids: np.ndarray
    digest: str
    answers: Callable[[], Sequence[TokenIds]]
    right: int
    limit: int
    grade: Callable[[Sequence[int]], tuple[float, bool]]
    lead: str = ""


class Asking(Task):
    """Ids of samples: (one of `parts`, length, depth or None, number below `count`).

    guess: score of guessing in the mode generate, if known. per_token: whether candidates of different numbers of
    tokens are ranked by log-probability per token. further: settings for the report.
    """

    mode: str
    pieces: PieceTokenizer
    frame: Frame | None
    parts: Sequence[str]
    depths: Sequence[float | None] = (None,)
    count: int
    seed: int
    further: dict[str, Any]
    guess: float | None = None
    per_token = False

    @property
    def needs_losses(self) -> bool:
        return self.mode == "rank"

    @property
    def settings(self) -> dict[str, Any]:
        own = {"mode": self.mode, "samples": self.count, "seed": self.seed, "chat_template": self.frame is not None}
        return own | self.further

    def samples(self, *, one_pass: bool) -> list[SampleId]:
        return list(product(self.parts, self.lengths, self.depths, range(self.count)))

    def question(self, sample: SampleId) -> Question:
        """Raises DataError for a length that is too short."""
        raise NotImplementedError

    def longest(self) -> tuple[np.ndarray, int, int]:
        sample = max(self.samples(one_pass=False), key=lambda sample: sample[1])
        thought = self.frame.thought if self.frame else 0
        length = sample[1] + thought + _MOST_OF_MARK * bool(thought)
        return self.question(sample).ids, length, 0  # 0: the ids of other prompts are not known before they are made

    def tokens(self, sample: SampleId) -> int:
        return int(sample[1])

    def score(self, reader: Reader, batch: Sequence[SampleId]) -> list[Any]:
        """[score, digest, score of guessing, whether a thought is in the answer, or was asked for and cut] of each."""
        questions = [self.question(sample) for sample in batch]
        prompts = [question.ids for question in questions]
        if self.mode == "rank":
            answers = [question.answers() for question in questions]
            values = reader.log_probabilities(zip(prompts, answers, strict=True))
            return [self._score_ranks(*ranked) for ranked in zip(batch, questions, answers, values, strict=True)]

        def done(index: int, tokens: Sequence[int]) -> bool:
            return questions[index].grade(tokens)[1] or len(tokens) >= questions[index].limit

        limit = max(question.limit for question in questions)
        thoughts = [bool(self.frame and self.frame.opens_thought)] * len(questions)
        if self.frame and self.frame.thought:
            prompts, thoughts = self._think(reader, questions, self.frame)
        scored: list[Any] = []
        for question, tokens, thought in zip(questions, reader.generate(prompts, limit, done), thoughts, strict=True):
            text = self.pieces.text(answer := tokens[: question.limit])
            seen = thought or THOUGHT in text or THOUGHT_ENDS in text
            scored.append([question.grade(answer)[0], question.digest, self.guess, seen])
        return scored

    def _think(self, reader: Reader, questions: Sequence[Question], frame: Frame) -> tuple[list[Any], list[bool]]:
        """The prompts, each with the model's thought and what begins the answer; and whether the thought was cut."""

        def done(index: int, tokens: Sequence[int]) -> bool:
            return THOUGHT_ENDS in self.pieces.text(tokens[-_MOST_OF_MARK:])

        prompts, cut = [], []
        generated = reader.generate([question.ids for question in questions], frame.thought, done)
        for question, tokens in zip(questions, generated, strict=True):
            thought, ends, _ = self.pieces.text(tokens).partition(THOUGHT_ENDS)
            thinks = frame.opens_thought or thought.lstrip().startswith(THOUGHT)
            before = f"{thought.rstrip()}\n{THOUGHT_ENDS}\n\n" if thinks else ""
            prompts.append(np.array([*question.ids, *self.pieces.inside(before + question.lead)], dtype=np.int64))
            cut.append(thinks and not ends)
        return prompts, cut

    def _score_ranks(
        self, sample: SampleId, question: Question, answers: Sequence[TokenIds], values: np.ndarray
    ) -> list[Any]:
        """values: the log-probability of each answer, nats."""
        if not np.isfinite(values).all():
            raise RopecliError(
                f"A log-probability is not finite at length {sample[1]}: the model overflows. Try another --dtype."
            )
        if self.per_token:
            values = values / [len(answer) for answer in answers]
        return [score_of_ranks(values, question.right), question.digest, question.right / len(values), False]

    def cells(self, values: Values) -> list[Cell]:
        cells = []
        for (task, length, depth), samples in groupby(values, key=lambda sample: sample[:-1]):
            scores, _, chances, thoughts = zip(*(values[sample] for sample in samples), strict=True)
            chance = None if chances[0] is None else float(np.mean(chances))  # of all samples of a cell, or of none
            cells.append(score_cell(task, length, scores, depth=depth, chance=chance, thoughts=sum(thoughts)))
        return cells

    def fingerprint(self, values: Values) -> str:
        return digest([value[1] for value in values.values()])


def score_of_ranks(values: np.ndarray, right: int) -> float:
    """Share of the right candidates that are among the best `right` of all. A tie counts against them.

    values: shape (candidates,), the right ones first. right: number of right ones.
    """
    # a right candidate is among the best if fewer than `right` others are at least as good
    wrong = values[right:]
    best_first = sorted(values[:right], reverse=True)
    return sum(better + int((wrong >= value).sum()) < right for better, value in enumerate(best_first)) / right
