"""Prompts of exactly N tokens, answer included: special tokens, introduction, text with needles, question.

The keys are random numbers of five digits. Each needle is a separate line. The question is the last line, which the key
completes. Each piece is tokenized separately, so no needle is cut and its position is exact. The same task, length,
depth, index and seed give the same prompt for every model with the same tokenizer.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from string import Formatter

import numpy as np

from ropecli.data.sources import DEMO, DEMO_TRAIN
from ropecli.errors import DataError, MethodError
from ropecli.evaluation.prompt_pieces import Frame, Haystack, PieceTokenizer, TokenIds
from ropecli.evaluation.request import NeedleOptions, with_config
from ropecli.hashing import digest

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


def _fields(what: str, template: str, *allowed: str) -> set[str]:
    """The fields of a template. Raises MethodError for one that is not allowed, and for a single brace."""
    try:
        parts = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError:
        parts = [("{", None, None)]
    if any(field not in allowed or spec or conversion for field, spec, conversion in parts):
        known = " and ".join(f"{{{field}}}" for field in allowed)
        raise MethodError(
            f"The {what} is {template!r}; expected only {known} in braces. Write a literal brace as {{{{ or }}}}."
        )
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
        _fields("question", self.question, "name")
        if "key" not in _fields("needle", self.needle, "key", "name"):
            raise MethodError(f"The needle is {self.needle!r}; expected {{key}} in it.")

    def check_needles(self, count: int) -> None:
        """Raise MethodError if the templates do not distinguish `count` needles."""
        if not 0 < count <= len(self.names):
            raise MethodError(f"The number of needles is {count}; expected 1 to {len(self.names)}.")
        in_both = _fields("needle", self.needle, "key", "name") & _fields("question", self.question, "name")
        if count > 1 and not in_both:
            raise MethodError(
                f"{count} needles require {{name}} in the needle and in the question; they are {self.needle!r} and "
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


def choose_templates(options: NeedleOptions) -> Templates:
    """The templates of a style, or the user's own with the names of the data's style.

    Raises MethodError for templates that are not both given, or together with a style, and for
    templates that do not distinguish several needles.
    """
    style, needle, question = options["style"], options["needle"], options["question"]
    default = default_style(with_config(options["data"], options["dataset_config"]))
    if needle is None and question is None:
        templates = STYLES[style or default]
    elif needle is None or question is None or style is not None:
        raise MethodError("--needle and --question must be given together, and without --style.")
    else:
        templates = Templates(needle, question, names=STYLES[default].names)
    templates.check_needles(options["num_needles"])
    return templates


@dataclass(frozen=True)
class Prompt:
    """ids: shape (tokens,), int64, without the answer. candidates: the texts to rank, the true key first.

    answers: tokens of the candidates; ids and the first answer together have `length` tokens. least: tokens without
    text around the needles, answer included; if they are more than `length`, the prompt is too long. lead: begins the
    answer after a thought; its tokens count too.
    """

    ids: np.ndarray
    candidates: tuple[str, ...]
    answers: tuple[TokenIds, ...]
    least: int
    lead: str = ""

    def digest(self) -> str:
        """sha256 of the prompt with the true key; the same for both modes."""
        return digest(np.array([*self.ids, *self.answers[0]]))


@dataclass(frozen=True)
class RetrievalPrompts:
    """Makes prompts. name: passkey or needle. num_needles: needles in a prompt; the question asks for one.

    num_candidates: answers to rank, including the keys of all needles. frame: of the chat template, if the model is
    asked through one.
    """

    name: str
    templates: Templates
    haystack: Haystack
    pieces: PieceTokenizer
    num_needles: int = 1
    num_candidates: int = 10
    seed: int = 0
    frame: Frame | None = None

    def __post_init__(self) -> None:
        if self.num_candidates <= self.num_needles:
            raise DataError(
                f"--candidates is {self.num_candidates}; expected at least {self.num_needles + 1} for "
                f"{self.num_needles} needles."
            )

    def check_room(self, length: int, depths: Sequence[float], samples: int) -> None:
        """Raise DataError for a length that is too short for some prompt, naming one that fits all of them."""
        least = length
        # prompts of another length have other names and keys, which may take more tokens
        while (needed := self.most_tokens(least, depths, samples)) > least:
            least = needed
        if least > length:
            raise DataError(
                f"A prompt of {length} tokens is too short for its introduction, needles and question. Set --lengths "
                f"to at least {least}."
            )

    def most_tokens(self, length: int, depths: Sequence[float], samples: int) -> int:
        """Tokens of the longest prompt without its haystack. Other names and keys never take twice as many."""
        first = self.prompt(length, depths[0], 0).least
        if 2 * first < length:
            return first
        return max(self.prompt(length, depth, index).least for depth in depths for index in range(samples))

    def prompt(self, length: int, depth: float, index: int) -> Prompt:
        """Build a prompt. The number of candidates does not change its tokens."""
        rng = np.random.default_rng((self.seed, length, round(depth * _DEPTH_STEPS), index))
        templates, pieces = self.templates, self.pieces
        names = [templates.names[place] for place in rng.permutation(len(templates.names))[: self.num_needles]]
        introduction = f"{templates.introduction}\n" if templates.introduction else ""
        head = pieces.head(introduction, self.frame)
        line, lead = templates.question_line(names[0]), ""
        if self.frame:
            # what follows the question mark begins the assistant's answer
            stop = line.rfind("?") + 1
            lead = line[stop:].lstrip() if self.frame.thought else ""
            line = f"{line[:stop]}{self.frame.after}{line[stop:].lstrip()}"
        # before it is cut to size, so that keys missing in it are missing in every part of it
        text = self.haystack.stretch(length, rng)
        candidates = self._draw_candidates(rng, names, line, text)
        needles = [pieces.inside(needle) for needle in self._needle_lines(names, candidates)]
        question, completed = pieces.inside(line), [pieces.inside(line + key) for key in candidates]
        # if the tokenizer merges the end of the question with a key, that token belongs to the answer
        shared = _common_beginning([question, *completed])
        least = len(head) + sum(map(len, needles)) + len(completed[0])
        text = text[: max(0, length - least)]
        # the first needle is asked for; the others are spread evenly over the text
        depths = [depth, *((place + 0.5) / (self.num_needles - 1) for place in range(self.num_needles - 1))]
        ids, read = list(head), 0
        for place, needle in sorted(zip(depths, needles, strict=True), key=lambda pair: pair[0]):
            cut = round(place * len(text))
            ids += [*text[read:cut].tolist(), *needle]
            read = cut
        asked = pieces.inside(line.removesuffix(lead)) if lead else completed[0][:shared]
        ids += [*text[read:].tolist(), *asked]
        answers = tuple(tokens[shared:] for tokens in completed)
        return Prompt(np.array(ids, dtype=np.int64), candidates, answers, least, lead.rstrip())

    def _draw_candidates(
        self, rng: np.random.Generator, names: Sequence[str], line: str, text: np.ndarray
    ) -> tuple[str, ...]:
        """The keys to hide, and candidates that appear nowhere in the prompt. line: the question."""
        templates, question = self.templates, self.pieces.inside(line)

        def form_of(key: str) -> tuple[int, int]:
            completed = self.pieces.inside(line + key)
            return len(completed), _common_beginning([question, completed])

        texts = [self.pieces.text(text), templates.introduction, templates.needle, templates.question]
        drawn = draw_keys(rng, numbers_in("\n".join(texts)), form_of)
        hidden = tuple(islice(drawn, self.num_needles))
        in_needles = numbers_in("".join(self._needle_lines(names, hidden)))  # '1{key}' contains other numbers
        unused = (key for key in drawn if key not in in_needles)
        return (*hidden, *islice(unused, self.num_candidates - self.num_needles))

    def _needle_lines(self, names: Sequence[str], keys: Sequence[str]) -> list[str]:
        return [self.templates.needle_line(*pair) for pair in zip(names, keys, strict=False)]


def _common_beginning(sequences: Sequence[TokenIds]) -> int:
    """Length of the longest common prefix, tokens."""
    differ = (len(set(tokens)) > 1 for tokens in zip(*sequences, strict=False))
    return next((index for index, differs in enumerate(differ) if differs), min(map(len, sequences)))


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
