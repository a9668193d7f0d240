"""Build prompts of exactly N tokens, answer included: special tokens, introduction, text with needles, question.

The keys are random numbers of five digits. Each piece is tokenized separately, so no needle is cut and its position is
exact. The same task, length, depth, trial and seed give the same prompt for every model with the same tokenizer.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice

import numpy as np

from ropecli.errors import DataError
from ropecli.evaluation.chat_frame import Frame
from ropecli.evaluation.retrieval.haystack import Haystack, PieceTokenizer, TokenIds, common_beginning
from ropecli.evaluation.retrieval.templates import Templates

_DEPTH_STEPS = 10**6
_LOWEST_KEY, _HIGHEST_KEY = 10_000, 99_999
KEY_COUNT = _HIGHEST_KEY - _LOWEST_KEY + 1
_SAMPLE = 32
"""Keys sampled to find the most common form."""
_TRIES = 10_000
"""Keys searched for that form, before keys of other forms are taken."""
_NUMBER = re.compile("(?=([1-9][0-9]{4}))")


@dataclass(frozen=True)
class RetrievalPrompts:
    """name: passkey or needle. keys: number of needles in a prompt; the question asks for one. candidates: number of
    answers to rank, including the keys of all needles. frame: of the chat template, if the model is asked through one.
    """

    name: str
    templates: Templates
    haystack: Haystack
    pieces: PieceTokenizer
    keys: int = 1
    candidates: int = 10
    seed: int = 0
    frame: Frame | None = None

    def __post_init__(self) -> None:
        self.templates.check_keys(self.keys)
        if self.candidates <= self.keys:
            raise DataError(
                f"--candidates is {self.candidates}; expected at least {self.keys + 1} for {self.keys} keys."
            )

    def prompt(self, length: int, depth: float, trial: int) -> "Prompt":
        """Build a prompt. Raises DataError for a length too short for needles and question.

        The number of candidates does not change the tokens of the prompt.
        """
        draft = self._draft(length, depth, trial)
        if draft.words > length:
            raise _too_short(length, draft.words)
        return draft.finish()

    def check_room(self, lengths: Sequence[int], depths: Sequence[float], trials: int) -> None:
        """Raise DataError if a length is too short for some prompt, naming a length that fits all of them."""
        for length in sorted(lengths):
            if 2 * self._draft(length, depths[0], 0).words < length:
                return  # other names and keys add a few tokens, not twice as many
            least = length
            # prompts of another length have other names and keys, which may take more tokens
            while (needed := self._most_words(least, depths, trials)) > least:
                least = needed
            if least > length:
                raise _too_short(length, least)

    def has_room(self, length: int, depths: Sequence[float], trials: int) -> bool:
        return self._most_words(length, depths, trials) <= length

    def _most_words(self, length: int, depths: Sequence[float], trials: int) -> int:
        return max(self._draft(length, depth, trial).words for depth in depths for trial in range(trials))

    def _draft(self, length: int, depth: float, trial: int) -> "_Draft":
        seed = (self.seed, length, round(depth * _DEPTH_STEPS), trial)
        return _Draft(self, np.random.default_rng(seed), length, depth)


def _too_short(length: int, least: int) -> DataError:
    return DataError(
        f"A prompt of {length} tokens is too short for its introduction, needles and question. Set --lengths to at "
        f"least {least}."
    )


@dataclass(frozen=True)
class Prompt:
    """ids: shape (tokens,), int64, without the answer. keys: the candidates' texts, the true key first.

    answers: tokens of the candidates; ids and the first answer together have `length` tokens. needle: first position of
    the needle that the question asks for.
    """

    ids: np.ndarray
    keys: tuple[str, ...]
    answers: tuple[TokenIds, ...]
    needle: int

    def digest(self) -> str:
        """sha256 of the prompt with the true key; the same for both modes."""
        return hashlib.sha256(np.array([*self.ids, *self.answers[0]], dtype="<i8").tobytes()).hexdigest()


class _Draft:
    """A prompt under construction. words: number of tokens without the haystack, answer included."""

    def __init__(self, task: RetrievalPrompts, rng: np.random.Generator, length: int, depth: float) -> None:
        self.task = task
        self.length = length
        pieces, templates = task.pieces, task.templates
        order = rng.permutation(len(templates.names))[: task.keys]
        self.names = [templates.names[index] for index in order]
        introduction = f"{templates.introduction}\n" if templates.introduction else ""
        self.line = templates.question_line(self.names[0])
        if task.frame:
            # what follows the question mark begins the assistant's answer
            stop = self.line.rfind("?") + 1
            self.line = f"{self.line[:stop]}{task.frame.after}{self.line[stop:].lstrip()}"
            self.head = pieces.opening(task.frame.before + introduction)
        else:
            self.head = pieces.prefix + pieces.opening(introduction)
        self.asked = pieces.inside(self.line)
        # before it is cut to size, so that keys missing in it are missing in every part of it
        self.text = task.haystack.stretch(length, rng)
        self.keys = self._draw(rng)
        self.completed = [self._completed(key) for key in self.keys]
        # (depth, tokens) of each needle: first the one asked for; the others are spread evenly over the text
        distractors = task.keys - 1
        depths = [depth, *((index + 0.5) / distractors for index in range(distractors))]
        self.needles = list(zip(depths, map(pieces.inside, self._lines(self.keys)), strict=True))
        self.words = len(self.head) + sum(len(tokens) for _, tokens in self.needles) + len(self.completed[0])

    def _draw(self, rng: np.random.Generator) -> tuple[str, ...]:
        """The keys to hide, and candidates that appear nowhere in the prompt."""
        task, templates = self.task, self.task.templates
        text = [task.pieces.text(self.text), templates.introduction, templates.needle, templates.question]
        drawn = draw_keys(rng, numbers_in("\n".join(text)), self._form)
        hidden = tuple(islice(drawn, task.keys))
        in_needles = numbers_in("".join(self._lines(hidden)))  # a template such as '1{key}' contains other numbers
        unused = (key for key in drawn if key not in in_needles)
        return (*hidden, *islice(unused, task.candidates - task.keys))

    def _completed(self, key: str) -> TokenIds:
        return self.task.pieces.inside(self.line + key)

    def _form(self, key: str) -> tuple[int, int]:
        completed = self._completed(key)
        return len(completed), common_beginning([self.asked, completed])

    def finish(self) -> Prompt:
        # if the tokenizer merges the end of the question with a key, that token belongs to the answer
        shared = common_beginning([self.asked, *self.completed])
        answers = tuple(tokens[shared:] for tokens in self.completed)
        text = self.text[: self.length - self.words]
        ids, at, read = list(self.head), 0, 0
        for depth, needle in sorted(self.needles, key=lambda pair: pair[0]):
            cut = round(depth * len(text))
            ids += text[read:cut].tolist()
            read = cut
            if needle is self.needles[0][1]:
                at = len(ids)
            ids += needle
        ids += [*text[read:].tolist(), *self.completed[0][:shared]]
        return Prompt(np.array(ids, dtype=np.int64), self.keys, answers, at)

    def _lines(self, keys: Sequence[str]) -> list[str]:
        return [self.task.templates.needle_line(*pair) for pair in zip(self.names, keys, strict=False)]


def numbers_in(text: str) -> set[str]:
    """All keys in the text, including parts of longer numbers."""
    return set(_NUMBER.findall(text))


def draw_keys(rng: np.random.Generator, taken: set[str], form_of: Callable[[str], Hashable]) -> Iterator[str]:
    """Yield distinct keys that are not in `taken`, in an order that does not depend on how many are drawn.

    form_of: what candidates should have in common, such as the number of tokens, so that their log-probabilities are
    comparable. Keys of the most common form come first, then keys of other forms. Raises DataError when none is left.
    """
    form_of = cache(form_of)
    free = (key for key in map(str, (_LOWEST_KEY + rng.permutation(KEY_COUNT)).tolist()) if key not in taken)
    sample = list(islice(free, _SAMPLE))
    common = Counter(map(form_of, sample)).most_common(1)[0][0] if sample else None
    rare = []
    for key in chain(sample, islice(free, _TRIES)):
        if form_of(key) == common:
            yield key
        else:
            rare.append(key)
    yield from rare
    yield from free
    raise DataError(
        f"Too few numbers of five digits are left for keys: {len(taken)} of {KEY_COUNT} appear in the text. Use "
        "another --data, shorter --lengths or fewer --candidates."
    )
