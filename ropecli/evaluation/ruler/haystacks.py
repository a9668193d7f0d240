"""Tokens that prompts are made of, each piece tokenized once: essay, noise, words, documents of questions."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from ropecli.errors import DataError, first_fault, shown
from ropecli.evaluation.retrieval.haystack import PieceTokenizer, TokenIds
from ropecli.evaluation.ruler.definitions import NOISE

_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_LONGEST_SENTENCE = 100
"""Words; longer sentences, as in source code, are cut."""
_LARGEST = 2**28
"""Bytes of a file of questions."""


class Pieces:
    """Token ids of pieces of text as they are inside a longer text; each piece is tokenized once."""

    def __init__(self, tokenizer: PieceTokenizer) -> None:
        self.tokenizer = tokenizer
        self.line_break = (tokenizer.inside("\n") or tokenizer.opening(" .") or tokenizer.opening("0"))[-1]
        self._known: dict[str, TokenIds] = {}

    def of(self, texts: Sequence[str]) -> list[TokenIds]:
        """Tokenize several pieces, keeping the result for those that appear again."""
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if new:
            self._known.update(zip(new, self.tokenizer.insides(new), strict=True))
        return [self._known[text] for text in texts]

    @cached_property
    def noise(self) -> TokenIds:
        """A line of noise, with the line break before it."""
        return self.tokenizer.inside(f"\n{NOISE}")

    @cached_property
    def words(self) -> list[str]:
        """Nouns, adjectives and verbs, sorted."""
        return sorted({word for kind in ("nouns", "adjectives", "verbs") for word in word_list(kind)})


@cache
def word_list(kind: str) -> list[str]:
    """English nouns, adjectives or verbs, as RULER takes them, from the package wonderwords."""
    from wonderwords import RandomWord

    return RandomWord().filter(include_categories=[kind])


@dataclass(frozen=True)
class Essay:
    """Sentences of a source, as tokens; repeated if the source is too short. words: of the source.

    sentences: each begins with a space. opening: the first one without it.
    """

    sentences: list[TokenIds]
    opening: TokenIds
    words: int

    def read(self, tokens: int, *, after_needle: bool = False) -> list[TokenIds]:
        """The first sentences, `tokens` tokens long; the last is cut. after_needle: they do not open the text."""
        pieces: list[TokenIds] = []
        left = tokens
        index = 0
        while left > 0:
            sentence = self.sentences[index % len(self.sentences)] if index or after_needle else self.opening
            pieces.append(sentence[:left])
            left -= len(sentence)
            index += 1
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
    opening = pieces.inside(sentences[0].removeprefix(" "))
    return Essay(tokens, opening, sum(sentence.count(" ") for sentence in sentences))


@dataclass(frozen=True)
class Question:
    """documents: indices of those with the answer. near: of others about the same article."""

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    questions: list[Question]
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
        if path.stat().st_size > _LARGEST:
            raise DataError(f"{path} has more than {_LARGEST >> 20} MiB.")
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
                Question(qa.question, tuple(answer.text for answer in qa.answers), (number,), near)
                for qa in paragraph.qas
                if qa.answers and not qa.is_impossible
            ]
    return QuestionSet(questions, documents)


def _from_hotpotqa(items: list[_HotpotQuestion]) -> QuestionSet:
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in item.context] for item in items]
    documents = sorted({document for texts_of_item in texts for document in texts_of_item})
    index = {document: number for number, document in enumerate(documents)}
    questions = [
        Question(item.question, (item.answer,), tuple(dict.fromkeys(index[document] for document in texts_of_item)))
        for item, texts_of_item in zip(items, texts, strict=True)
    ]
    return QuestionSet(questions, documents)
