"""Prompts of exactly N tokens, answer included: special tokens, introduction, text with needles, question.

The keys are random numbers of five digits. Each needle is a separate line. The question is the last line, which the key
completes. Each piece is tokenized separately, so no needle is cut and its position is exact. The same task, length,
depth, trial and seed give the same prompt for every model with the same tokenizer.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from string import Formatter

import numpy as np

from ropecli.data.sources import DEMO, DEMO_TRAIN
from ropecli.errors import DataError, MethodError, did_you_mean
from ropecli.evaluation.prompt_pieces import Frame, Haystack, PieceTokenizer, TokenIds

_WORDS = (
    "Amber Birch Cedar Clover Copper Coral Crystal Dahlia Ebony Ember Falcon Fern Garnet Ginger Hazel Indigo Ivory "
    "Jasmine Lotus Maple Marble Nectar Olive Onyx Orchid Pearl Quartz Raven Ruby Saffron Topaz Willow"
)
_NAMES = tuple(_WORDS.split())
_OPENING = "\"'`([{<"
_DEPTH_STEPS = 10**6
_LOWEST_KEY, _HIGHEST_KEY = 10_000, 99_999
KEY_COUNT = _HIGHEST_KEY - _LOWEST_KEY + 1
_SAMPLE = 32
"""Keys sampled to find the most common form."""
_TRIES = 10_000
"""Keys searched for that form, before keys of other forms are taken."""
_NUMBER = re.compile("(?=([1-9][0-9]{4}))")


def _fields(what: str, template: str) -> set[str]:
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise MethodError(
            f"The {what} {template!r} is not a valid template: {error}. Write a literal brace as {{{{ or }}}}."
        ) from error
    if any(field not in ("key", "name") or spec or conversion for field, spec, conversion in parts):
        raise MethodError(f"The {what} is {template!r}; only {{key}} and {{name}} are allowed in braces.")
    return {str(field) for field, _, _ in parts}


@dataclass(frozen=True)
class Templates:
    """The wording of a prompt. needle: contains {key}, and {name} for several needles. question: contains {name} then.

    names: values for {name}, a different one for each needle. Raises MethodError for invalid templates.
    """

    needle: str
    question: str
    introduction: str = ""
    names: tuple[str, ...] = _NAMES

    def __post_init__(self) -> None:
        if "key" not in _fields("needle", self.needle):
            raise MethodError(f"The needle is {self.needle!r}; expected {{key}} in it.")
        if "key" in _fields("question", self.question):
            raise MethodError(f"The question is {self.question!r}; remove {{key}}, which is the answer.")

    def check_keys(self, count: int) -> None:
        """Raise MethodError if the templates do not distinguish `count` needles."""
        if not 0 < count <= len(self.names):
            raise MethodError(f"The number of needles is {count}; expected 1 to {len(self.names)}.")
        if count > 1 and "name" not in _fields("needle", self.needle) & _fields("question", self.question):
            raise MethodError(
                f"{count} keys require {{name}} in the needle and in the question; they are {self.needle!r} and "
                f"{self.question!r}."
            )

    def needle_line(self, name: str, key: str) -> str:
        return f"\n{self.needle.format(name=name, key=key)}\n"

    def question_line(self, name: str) -> str:
        """The question, ending with white space or an opening quote or bracket, so that the key can follow."""
        line = f"\n{self.question.format(name=name)}"
        return line if line[-1].isspace() or line[-1] in _OPENING else f"{line} "


# Mohtashami & Jaggi 2023, arXiv:2305.16300: the prompt, line by line. After the needle, the sentences continue where
# they were cut instead of starting again.
PASSKEY = Templates(
    introduction="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.",
    needle="The pass key is {key}. Remember it. {key} is the pass key.",
    question="What is the pass key? The pass key is",
)
PASSKEY_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

STYLES = {
    # the question repeats the needle's words: small models that follow no instructions can copy from there
    "code": Templates("{name}_KEY = {key}", "{name}_KEY =", names=tuple(name.upper() for name in _NAMES)),
    "prose": Templates(
        introduction="Somewhere in the text below a secret number is given. Remember it for the question at the end.",
        needle="The secret number of {name} is {key}.",
        question="What is the secret number of {name}? The secret number of {name} is",
    ),
}


def default_style(source: str) -> str:
    """The style for this data: code for the demo text, else prose."""
    return "code" if source in (DEMO, DEMO_TRAIN) else "prose"


def choose_templates(style: str | None, needle: str | None, question: str | None, default: str) -> Templates:
    """Return the templates of a style, or the user's own with the names of the style `default`.

    Raises MethodError for an unknown style, for only one of two templates, and for a style together with templates.
    """
    if needle is None and question is None:
        style = style or default
        if style not in STYLES:
            raise MethodError(f"Unknown style {style!r}. Known: {', '.join(STYLES)}.{did_you_mean(style, STYLES)}")
        return STYLES[style]
    if needle is None or question is None:
        raise MethodError("--needle and --question must be given together.")
    if style is not None:
        raise MethodError(f"--style {style} cannot be used with --needle and --question.")
    return Templates(needle, question, names=STYLES[default].names)


@dataclass(frozen=True)
class Prompt:
    """ids: shape (tokens,), int64, without the answer. keys: the candidates' texts, the true key first.

    answers: tokens of the candidates; ids and the first answer together have `length` tokens.
    """

    ids: np.ndarray
    keys: tuple[str, ...]
    answers: tuple[TokenIds, ...]

    def digest(self) -> str:
        """sha256 of the prompt with the true key; the same for both modes."""
        return hashlib.sha256(np.array([*self.ids, *self.answers[0]], dtype="<i8").tobytes()).hexdigest()


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

    def prompt(self, length: int, depth: float, trial: int) -> Prompt:
        """Build a prompt. Raises DataError for a length too short for needles and question.

        The number of candidates does not change the tokens of the prompt.
        """
        draft = self._draft(length, depth, trial)
        if draft.words > length:
            raise _too_short(length, draft.words)
        return draft.finish()

    def check_room(self, length: int, depths: Sequence[float], trials: int) -> None:
        """Raise DataError for a length that is too short for some prompt, naming one that fits all of them."""
        least = length
        # prompts of another length have other names and keys, which may take more tokens
        while (needed := self._most_words(least, depths, trials)) > least:
            least = needed
        if least > length:
            raise _too_short(length, least)

    def has_room(self, length: int, depths: Sequence[float], trials: int) -> bool:
        return self._most_words(length, depths, trials) <= length

    def _most_words(self, length: int, depths: Sequence[float], trials: int) -> int:
        """Tokens of the longest prompt without its haystack. Other names and keys never take twice as many."""
        first = self._draft(length, depths[0], 0).words
        if 2 * first < length:
            return first
        return max(self._draft(length, depth, trial).words for depth in depths for trial in range(trials))

    def _draft(self, length: int, depth: float, trial: int) -> "_Draft":
        seed = (self.seed, length, round(depth * _DEPTH_STEPS), trial)
        return _Draft(self, np.random.default_rng(seed), length, depth)


def _too_short(length: int, least: int) -> DataError:
    return DataError(
        f"A prompt of {length} tokens is too short for its introduction, needles and question. Set --lengths to at "
        f"least {least}."
    )


class _Draft:
    """A prompt under construction. words: number of tokens without the haystack, answer included."""

    def __init__(self, task: RetrievalPrompts, rng: np.random.Generator, length: int, depth: float) -> None:
        self.task, self.length = task, length
        pieces, templates = task.pieces, task.templates
        self.names = [templates.names[index] for index in rng.permutation(len(templates.names))[: task.keys]]
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
        self.keys = self._draw_keys(rng)
        self.completed = [self._completed(key) for key in self.keys]
        # (depth, tokens) of each needle: first the one asked for; the others are spread evenly over the text
        distractors = task.keys - 1
        depths = [depth, *((index + 0.5) / distractors for index in range(distractors))]
        self.needles = list(zip(depths, map(pieces.inside, self._needle_lines(self.keys)), strict=True))
        self.words = len(self.head) + sum(len(tokens) for _, tokens in self.needles) + len(self.completed[0])

    def _draw_keys(self, rng: np.random.Generator) -> tuple[str, ...]:
        """The keys to hide, and candidates that appear nowhere in the prompt."""
        task, templates = self.task, self.task.templates
        text = [task.pieces.text(self.text), templates.introduction, templates.needle, templates.question]
        drawn = draw_keys(rng, numbers_in("\n".join(text)), self._form)
        hidden = tuple(islice(drawn, task.keys))
        in_needles = numbers_in("".join(self._needle_lines(hidden)))  # '1{key}' contains other numbers
        unused = (key for key in drawn if key not in in_needles)
        return (*hidden, *islice(unused, task.candidates - task.keys))

    def _completed(self, key: str) -> TokenIds:
        return self.task.pieces.inside(self.line + key)

    def _form(self, key: str) -> tuple[int, int]:
        completed = self._completed(key)
        return len(completed), _common_beginning([self.asked, completed])

    def _needle_lines(self, keys: Sequence[str]) -> list[str]:
        return [self.task.templates.needle_line(*pair) for pair in zip(self.names, keys, strict=False)]

    def finish(self) -> Prompt:
        # if the tokenizer merges the end of the question with a key, that token belongs to the answer
        shared = _common_beginning([self.asked, *self.completed])
        answers = tuple(tokens[shared:] for tokens in self.completed)
        text = self.text[: self.length - self.words]
        ids, read = list(self.head), 0
        for depth, needle in sorted(self.needles, key=lambda pair: pair[0]):
            cut = round(depth * len(text))
            ids += [*text[read:cut].tolist(), *needle]
            read = cut
        ids += [*text[read:].tolist(), *self.completed[0][:shared]]
        return Prompt(np.array(ids, dtype=np.int64), self.keys, answers)


def _common_beginning(sequences: Sequence[TokenIds]) -> int:
    """Length of the longest common prefix, tokens."""
    alike = (len(set(tokens)) == 1 for tokens in zip(*sequences, strict=False))
    return next((index for index, same in enumerate(alike) if not same), min(map(len, sequences)))


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
