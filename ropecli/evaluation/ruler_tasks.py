"""The tasks of RULER: wording, sizes, number of generated tokens, scores, and the texts that they read.

Source: Hsieh et al. 2024, arXiv:2404.06654, and the configuration of github.com/NVIDIA/RULER (scripts/synthetic.yaml,
scripts/data/synthetic/constants.py). The wording and the scores follow the code. These are eleven of its thirteen
tasks: qa_1 and qa_2 ask about SQuAD and HotpotQA; lm-evaluation-harness has them.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle, islice
from typing import Literal

from ropecli.errors import DataError
from ropecli.evaluation.prompt_pieces import PieceTokenizer, TokenIds

_CONTROL = re.compile(r"[\x00-\x1f]")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_LONGEST_SENTENCE = 100
"""Words; longer sentences, as in source code, are cut."""
Words = Literal["numbers", "words", "uuids"]
NEEDLE = "One of the special magic {values} for {key} is: {value}."


@dataclass(frozen=True)
class Wording:
    """head: before the context. tail: after it. answer: how the answer begins; the model continues it."""

    head: str
    tail: str
    answer: str


@dataclass(frozen=True)
class RulerTask:
    """generated: tokens that the model may generate. They count for the length of a prompt."""

    name: str
    wording: Wording
    generated: int


@dataclass(frozen=True)
class Needles(RulerTask):
    """Needles in a haystack. haystack: essay, noise, or other needles. key, value: their form.

    num_keys: needles with different keys. num_values: needles of each key. num_queries: keys that are asked for.
    """

    haystack: Literal["noise", "essay", "needles"] = "essay"
    key: Words = "words"
    value: Words = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1


_NEEDLES = Wording(
    "Some special magic {values} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {values} afterwards.\n",
    "\nWhat are all the special magic {values} for {asked} mentioned in the provided text?",
    " The special magic {values} for {asked} mentioned in the provided text are",
)
_NEEDLE = Wording(
    "A special magic {values} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{values} afterwards.\n",
    "\nWhat is the special magic {values} for {asked} mentioned in the provided text?",
    " The special magic {values} for {asked} mentioned in the provided text is",
)
_VARIABLES = Wording(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "\nQuestion: Find all variables that are assigned the value {value} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:",
)
_COMMON = Wording(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n",
    "\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)
_FREQUENT = Wording(
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words.",
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)
TASKS: dict[str, RulerTask] = {
    task.name: task
    for task in (
        Needles("niah_single_1", _NEEDLE, 128, haystack="noise"),
        Needles("niah_single_2", _NEEDLE, 128),
        Needles("niah_single_3", _NEEDLE, 128, value="uuids"),
        Needles("niah_multikey_1", _NEEDLE, 128, num_keys=4),
        Needles("niah_multikey_2", _NEEDLE, 128, haystack="needles"),
        Needles("niah_multikey_3", _NEEDLE, 128, haystack="needles", key="uuids", value="uuids"),
        Needles("niah_multivalue", _NEEDLES, 128, num_values=4),
        Needles("niah_multiquery", _NEEDLES, 128, num_keys=4, num_queries=4),
        RulerTask("vt", _VARIABLES, 30),
        RulerTask("cwe", _COMMON, 120),
        RulerTask("fwe", _FREQUENT, 50),
    )
}


def score_of(answer: str, references: Sequence[str]) -> float:
    """Share of the references that appear in the answer, ignoring case."""
    text = _CONTROL.sub("\n", answer.strip()).strip().lower()
    return sum(reference.lower() in text for reference in references) / len(references)


@cache
def word_list(kind: str) -> list[str]:
    """English nouns, adjectives or verbs, as RULER takes them, from the package wonderwords."""
    from wonderwords import RandomWord

    return RandomWord().filter(include_categories=[kind])


@dataclass(frozen=True)
class Essay:
    """Sentences, as tokens; repeated where they are too few.

    sentences: each begins with a space. opening: the first one without it.
    """

    sentences: list[TokenIds]
    opening: TokenIds

    def read(self, tokens: int, *, after_needle: bool = False) -> list[TokenIds]:
        """The first sentences, `tokens` tokens long; the last is cut. after_needle: they do not open the text."""
        sentences: Iterator[TokenIds] = cycle(self.sentences)
        if not after_needle:
            sentences = chain([self.opening], islice(sentences, 1, None))
        pieces: list[TokenIds] = []
        while tokens > 0:
            pieces.append(next(sentences)[:tokens])
            tokens -= len(pieces[-1])
        return pieces


def read_essay(texts: Iterable[tuple[str, str]], pieces: PieceTokenizer, longest: int) -> Essay:
    """Split the documents of a source into sentences, enough for `longest` tokens. Raises DataError for none."""
    sentences: list[str] = []
    characters = 0
    for _, text in texts:
        for sentence in filter(None, _SENTENCE.split(" ".join(text.split()))):
            words = sentence.split(" ")
            parts = range(0, len(words), _LONGEST_SENTENCE)
            sentences += [f" {' '.join(words[start : start + _LONGEST_SENTENCE])}" for start in parts]
        characters += len(text)
        if characters > 12 * longest:  # more characters than these tokens can have
            break
    if not sentences:
        raise DataError("The source is empty. Set --data to a source with text.")
    return Essay([ids for ids in pieces.each_inside(sentences) if ids], pieces.inside(sentences[0].removeprefix(" ")))
