"""Prompts of exactly N tokens, answer included: special tokens, introduction, text with the needle, question.

The key is a random number of five digits. The needle is a separate line. The question is the last line, which the key
completes. Each piece is tokenized separately, so the needle is not cut and its position is exact. The same style,
length, depth, index and seed give the same prompt for every model with the same tokenizer.
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from ropecli.errors import DataError
from ropecli.evaluation.prompt_pieces import Frame, Haystack, PieceTokenizer, TokenIds

_WORDS = (
    "Amber Birch Cedar Clover Copper Coral Crystal Dahlia Ebony Ember Falcon Fern Garnet Ginger Hazel Indigo Ivory "
    "Jasmine Lotus Maple Marble Nectar Olive Onyx Orchid Pearl Quartz Raven Ruby Saffron Topaz Willow"
)
_NAMES = tuple(_WORDS.split())
_DEPTH_STEPS = 10**6
_LOWEST_KEY, _HIGHEST_KEY = 10_000, 99_999
KEY_COUNT = _HIGHEST_KEY - _LOWEST_KEY + 1
CANDIDATES = 10
"""Keys to rank, the true one among them."""
_SAMPLE = 32
"""Keys sampled to find the most common form."""
_NUMBER = re.compile("(?=([1-9][0-9]{4}))")


@dataclass(frozen=True)
class Templates:
    """The wording of a prompt. {key}: the number. {name}: one of `names`."""

    needle: str
    question: str
    introduction: str = ""
    names: tuple[str, ...] = _NAMES


PASSKEY_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."

STYLES = {
    # the question repeats the needle's words: small models that follow no instructions can copy from there
    "code": Templates("{name}_KEY = {key}", "{name}_KEY =", names=tuple(name.upper() for name in _NAMES)),
    "prose": Templates(
        introduction="Somewhere in the text below a secret number is given. Remember it for the question at the end.",
        needle="The secret number of {name} is {key}.",
        question="What is the secret number of {name}? The secret number of {name} is",
    ),
    # Mohtashami & Jaggi 2023, arXiv:2305.16300: the prompt, line by line. After the needle, the sentences continue
    # where they were cut instead of starting again.
    "passkey": Templates(
        introduction="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
        "I will quiz you about the important information there.",
        needle="The pass key is {key}. Remember it. {key} is the pass key.",
        question="What is the pass key? The pass key is",
    ),
}


@dataclass(frozen=True)
class Prompt:
    """ids: shape (tokens,), int64, without the answer. candidates: the texts to rank, the true key first.

    answers: tokens of the candidates; ids and the first answer together have `length` tokens. least: tokens without
    text around the needle, answer included; if they are more than `length`, the prompt is too long. lead: begins the
    answer after a thought; its tokens count too.
    """

    ids: np.ndarray
    candidates: tuple[str, ...]
    answers: tuple[TokenIds, ...]
    least: int
    lead: str = ""


@dataclass(frozen=True)
class RetrievalPrompts:
    """Makes prompts. frame: of the chat template, if the model is asked through it."""

    templates: Templates
    haystack: Haystack
    pieces: PieceTokenizer
    seed: int = 0
    frame: Frame | None = None

    def most_tokens(self, length: int, depths: Sequence[float], samples: int) -> int:
        """Tokens of the longest prompt without its haystack. Other names and keys never take twice as many."""
        first = self.prompt(length, depths[0], 0).least
        if 2 * first < length:
            return first
        return max(self.prompt(length, depth, index).least for depth in depths for index in range(samples))

    def prompt(self, length: int, depth: float, index: int) -> Prompt:
        """Build a prompt."""
        rng = np.random.default_rng((self.seed, length, round(depth * _DEPTH_STEPS), index))
        templates, pieces = self.templates, self.pieces
        name = templates.names[rng.permutation(len(templates.names))[0]]
        introduction = f"{templates.introduction}\n" if templates.introduction else ""
        head = pieces.head(introduction, self.frame)
        line, lead = f"\n{templates.question.format(name=name)} ", ""
        if self.frame:
            # what follows the question mark begins the assistant's answer
            stop = line.rfind("?") + 1
            lead = line[stop:].lstrip() if self.frame.thought else ""
            line = f"{line[:stop]}{self.frame.after}{line[stop:].lstrip()}"
        # before it is cut to size, so that keys missing in it are missing in every part of it
        text = self.haystack.stretch(length, rng)
        question = pieces.inside(line)

        def form_of(key: str) -> tuple[int, int]:
            completed = pieces.inside(line + key)
            return len(completed), _common_beginning([question, completed])

        keys = draw_keys(rng, numbers_in(pieces.text(text)), form_of)
        candidates = tuple(islice(keys, CANDIDATES))
        needle = pieces.inside(f"\n{templates.needle.format(name=name, key=candidates[0])}\n")
        completed = [pieces.inside(line + key) for key in candidates]
        # if the tokenizer merges the end of the question with a key, that token belongs to the answer
        shared = _common_beginning([question, *completed])
        least = len(head) + len(needle) + len(completed[0])
        text = text[: max(0, length - least)]
        cut = round(depth * len(text))
        asked = pieces.inside(line.removesuffix(lead)) if lead else completed[0][:shared]
        ids = [*head, *text[:cut].tolist(), *needle, *text[cut:].tolist(), *asked]
        answers = tuple(tokens[shared:] for tokens in completed)
        return Prompt(np.array(ids, dtype=np.int64), candidates, answers, least, lead.rstrip())


def _common_beginning(sequences: Sequence[TokenIds]) -> int:
    """Length of the longest common prefix, tokens."""
    differ = (len(set(tokens)) > 1 for tokens in zip(*sequences, strict=False))
    return next((index for index, differs in enumerate(differ) if differs), min(map(len, sequences)))


def numbers_in(text: str) -> set[str]:
    """All keys in the text, including parts of longer numbers."""
    return set(_NUMBER.findall(text))


def draw_keys(rng: np.random.Generator, taken: set[str], form_of: Callable[[str], Hashable]) -> Iterator[str]:
    """Yield distinct keys that are not in `taken`, in random order.

    form_of: what candidates should have in common, such as the number of tokens, so that their log-probabilities are
    comparable. All keys have the most common form. Raises DataError when none is left.
    """
    free = (key for key in map(str, (_LOWEST_KEY + rng.permutation(KEY_COUNT)).tolist()) if key not in taken)
    sample = list(islice(free, _SAMPLE))
    common = Counter(map(form_of, sample)).most_common(1)[0][0] if sample else None
    yield from (key for key in chain(sample, free) if form_of(key) == common)
    raise DataError(
        f"Too few numbers of five digits are left for keys: {len(taken)} of {KEY_COUNT} appear in the text. Use "
        "another --data, or shorter --lengths."
    )
