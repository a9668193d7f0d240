"""The tasks of RULER: wording, sizes, number of generated tokens, scores, and the texts that they read.

Source: Hsieh et al. 2024, arXiv:2404.06654, and the configuration of github.com/NVIDIA/RULER (scripts/synthetic.yaml,
scripts/data/synthetic/constants.py). The wording and the scores follow the code.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Literal

from ropecli.errors import DataError, MethodError, did_you_mean, first_fault, shown
from ropecli.evaluation.prompt_pieces import PieceTokenizer, TokenIds

_CONTROL = re.compile(r"[\x00-\x1f]")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_LONGEST_SENTENCE = 100
"""Words; longer sentences, as in source code, are cut."""
Words = Literal["numbers", "words", "uuids"]
NEEDLE = "One of the special magic {values} for {key} is: {value}."
SMALL = 4096
"""Below this length, the lists of common words are smaller, as in RULER's code."""


@dataclass(frozen=True)
class Wording:
    """head: before the context. tail: after it. answer: how the answer begins; the model continues it."""

    head: str
    tail: str
    answer: str


@dataclass(frozen=True)
class RulerTask:
    """generated: tokens that the model may generate. They count for the length of a prompt.

    ranked: whether the mode `rank` has candidates.
    """

    name: str
    wording: Wording
    generated: int
    ranked: bool = True


@dataclass(frozen=True)
class Needles(RulerTask):
    """Needles in a haystack. haystack: essay, noise, or other needles. key, value: their form.

    keys: needles with different keys. values: needles of each key. asked: keys that the question asks for.
    """

    haystack: Literal["noise", "essay", "needles"] = "essay"
    key: Words = "words"
    value: Words = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1


@dataclass(frozen=True)
class Variables(RulerTask):
    """A chain of variable assignments in noise. hops: assignments after the first. Begins with a solved example."""

    hops: int = 4


@dataclass(frozen=True)
class ListSize:
    """Sizes of a list. in_list: how often a common and another word appear. example, in_example: of the solved one."""

    in_list: tuple[int, int]
    example: int
    in_example: tuple[int, int]


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """A numbered list in which ten words are more frequent than the others. Begins with a solved example.

    sizes: the second one below 4,096 tokens, and wherever the first does not fit.
    """

    common: int = 10
    sizes: tuple[ListSize, ...] = (ListSize((30, 3), 40, (10, 3)), ListSize((6, 1), 20, (3, 1)))


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """Coded words whose frequencies follow a zeta distribution. The three most frequent are asked for."""

    alpha: float = 2.0
    letters: int = 6
    asked: int = 3


@dataclass(frozen=True)
class Questions(RulerTask):
    """A question about one or several of many documents. source: squad or hotpotqa."""

    source: Literal["squad", "hotpotqa"] = "squad"


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
_ONLY_THE_ANSWER = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
_QUESTIONS = Wording(
    f"{_ONLY_THE_ANSWER}\n\nThe following are given documents.\n\n",
    f"\n\n{_ONLY_THE_ANSWER}\n\nQuestion: {{question}}",
    " Answer:",
)

TASKS: dict[str, RulerTask] = {
    task.name: task
    for task in (
        Needles("niah_single_1", _NEEDLE, 128, haystack="noise"),
        Needles("niah_single_2", _NEEDLE, 128),
        Needles("niah_single_3", _NEEDLE, 128, value="uuids"),
        Needles("niah_multikey_1", _NEEDLE, 128, keys=4),
        Needles("niah_multikey_2", _NEEDLE, 128, haystack="needles"),
        Needles("niah_multikey_3", _NEEDLE, 128, haystack="needles", key="uuids", value="uuids"),
        Needles("niah_multivalue", _NEEDLES, 128, values=4),
        Needles("niah_multiquery", _NEEDLES, 128, keys=4, asked=4),
        Variables("vt", _VARIABLES, 30),
        CommonWords("cwe", _COMMON, 120),
        FrequentWords("fwe", _FREQUENT, 50),
        Questions("qa_1", _QUESTIONS, 32, ranked=False),
        Questions("qa_2", _QUESTIONS, 32, ranked=False, source="hotpotqa"),
    )
}
SYNTHETIC = tuple(name for name, task in TASKS.items() if not isinstance(task, Questions))
"""The eleven tasks that need no dataset of questions."""


def choose_tasks(names: Sequence[str] | None, mode: str, questions: Sequence[str]) -> list[RulerTask]:
    """The tasks of these names, in RULER's order. Default: the eleven, and those whose `questions` were given.

    Raises MethodError for an unknown name, a task without candidates in the mode rank or without its questions, or
    questions without their task.
    """
    chosen = [*SYNTHETIC, *questions] if names is None else list(names)
    for name in chosen:
        if name not in TASKS:
            raise MethodError(f"Unknown task {shown(name)}. Known: {', '.join(TASKS)}.{did_you_mean(name, TASKS)}")
        task = TASKS[name]
        if isinstance(task, Questions) and name not in questions:
            raise MethodError(f"{name} needs a file of questions: --{task.source} FILE.")
        if mode == "rank" and not task.ranked:
            raise MethodError(f"{name} has no candidates to rank. Use --mode generate.")
    for name, task in TASKS.items():
        if isinstance(task, Questions) and name in questions and name not in chosen:
            raise MethodError(f"--{task.source} is for {name}, which is not in --tasks. Add it, or remove the file.")
    return [task for name, task in TASKS.items() if name in chosen]


def score_of(answer: str, references: Sequence[str], *, any_of: bool = False) -> float:
    """Share of the references that appear in the answer, ignoring case. any_of: 1 if any of them does."""
    text = _CONTROL.sub("\n", answer.strip()).strip().lower()
    hits = [reference.lower() in text for reference in references]
    return float(any(hits)) if any_of else sum(hits) / len(hits)


@cache
def word_list(kind: str) -> list[str]:
    """English nouns, adjectives or verbs, as RULER takes them, from the package wonderwords."""
    from wonderwords import RandomWord

    return RandomWord().filter(include_categories=[kind])


@dataclass(frozen=True)
class Essay:
    """Sentences of a source, as tokens; repeated if the source is too short.

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
    """Split the documents of a source into sentences, enough for `longest` tokens. Raises DataError if empty."""
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
    tokens = [ids for ids in pieces.insides(sentences) if ids] if sentences else []
    if not tokens:
        raise DataError("The source is empty. Set --data to a source with text.")
    return Essay(tokens, pieces.inside(sentences[0].removeprefix(" ")))


@dataclass(frozen=True)
class DocumentQuestion:
    """documents: indices of those with the answer. near: of others about the same article."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    questions: list[DocumentQuestion]
    documents: list[str]


@dataclass(frozen=True)
class _SquadAnswer:
    text: str


@dataclass(frozen=True)
class _SquadQuestion:
    question: str
    answers: list[_SquadAnswer]
    is_impossible: bool = False


@dataclass(frozen=True)
class _SquadParagraph:
    context: str
    qas: list[_SquadQuestion]


@dataclass(frozen=True)
class _SquadArticle:
    paragraphs: list[_SquadParagraph]


@dataclass(frozen=True)
class _Squad:
    """SQuAD's JSON, 1.1 and 2.0."""

    data: list[_SquadArticle]


@dataclass(frozen=True)
class _HotpotQuestion:
    """context: title and sentences of each document."""

    question: str
    answer: str
    context: list[tuple[str, list[str]]]


def read_questions(path: Path, kind: str) -> QuestionSet:
    """Read a file of questions: kind squad or hotpotqa. Raises DataError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        if kind == "squad":
            read = _from_squad(TypeAdapter(_Squad).validate_json(path.read_bytes()))
        else:
            read = _from_hotpotqa(TypeAdapter(list[_HotpotQuestion]).validate_json(path.read_bytes()))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    except ValidationError as error:
        raise DataError(f"{path} is not a file of {kind} questions, {first_fault(error)}.") from error
    if not (read.questions and read.documents):
        raise DataError(f"{path} has no answerable questions.")
    for question in read.questions:
        if not all(map(str.strip, question.answers)):
            raise DataError(f"{path}: the question {shown(question.text)} has an empty answer.")
    return read


def _from_squad(squad: _Squad) -> QuestionSet:
    documents = sorted({paragraph.context for article in squad.data for paragraph in article.paragraphs})
    index = {document: number for number, document in enumerate(documents)}
    questions = []
    for article in squad.data:
        of_article = dict.fromkeys(index[paragraph.context] for paragraph in article.paragraphs)
        for paragraph in article.paragraphs:
            number = index[paragraph.context]
            near = tuple(neighbour for neighbour in of_article if neighbour != number)
            questions += [
                DocumentQuestion(qa.question, tuple(answer.text for answer in qa.answers), (number,), near)
                for qa in paragraph.qas
                if qa.answers and not qa.is_impossible
            ]
    return QuestionSet(questions, documents)


def _from_hotpotqa(items: list[_HotpotQuestion]) -> QuestionSet:
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in item.context] for item in items]
    documents = sorted({document for texts_of_item in texts for document in texts_of_item})
    index = {document: number for number, document in enumerate(documents)}
    questions = [
        DocumentQuestion(item.question, (item.answer,), tuple(dict.fromkeys(map(index.__getitem__, texts_of_item))))
        for item, texts_of_item in zip(items, texts, strict=True)
    ]
    return QuestionSet(questions, documents)
