"""Tokens that prompts are made of, each piece tokenized once: essay, noise, words, documents of questions."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ropecli.errors import DataError, reason_of
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
        self.line_break = (self.several(["\n"])[0] or tokenizer.opening(" .") or tokenizer.opening("0"))[-1]
        self._known: dict[str, TokenIds] = {}

    def several(self, texts: Sequence[str]) -> list[TokenIds]:
        """Tokenize several pieces in one call, which is much faster than one by one."""
        before = self.tokenizer.opening("\n")
        whole = self.tokenizer.openings([f"\n{text}" for text in texts])
        return [
            ids[len(before) :] if ids[: len(before)] == before else self.tokenizer.opening(text)
            for ids, text in zip(whole, texts, strict=True)
        ]

    def of(self, texts: Sequence[str]) -> list[TokenIds]:
        """The same, keeping the result for texts that appear again."""
        new = list(dict.fromkeys(text for text in texts if text not in self._known))
        if new:
            self._known.update(zip(new, self.several(new), strict=True))
        return [self._known[text] for text in texts]

    def one(self, text: str) -> TokenIds:
        return self.several([text])[0]

    @cached_property
    def noise(self) -> TokenIds:
        """A line of noise, with the line break before it."""
        return self.one(f"\n{NOISE}")

    @cached_property
    def words(self) -> list[str]:
        """Nouns, adjectives and verbs, sorted."""
        return sorted({word for kind in ("nouns", "adjectives", "verbs") for word in word_list(kind)})

    @cached_property
    def word_tokens(self) -> np.ndarray:
        """Tokens of each word after a space, shape (words,)."""
        return np.array([len(ids) for ids in self.of([f" {word}" for word in self.words])])


@cache
def word_list(kind: str) -> list[str]:
    """English nouns, adjectives or verbs, as RULER takes them, from the package wonderwords."""
    from wonderwords import RandomWord

    return RandomWord().filter(include_categories=[kind])


@dataclass(frozen=True)
class Essay:
    """Sentences of a source, as tokens; repeated if the source is too short. words: of the source."""

    sentences: list[TokenIds]
    words: int

    def read(self, tokens: int) -> list[TokenIds]:
        """The first sentences, `tokens` tokens long; the last is cut."""
        found: list[TokenIds] = []
        left = tokens
        index = 0
        while left > 0:
            sentence = self.sentences[index % len(self.sentences)]
            found.append(sentence[:left])
            left -= len(sentence)
            index += 1
        return found


def read_essay(texts: Iterable[tuple[str, str]], pieces: Pieces, longest: int) -> Essay:
    """Split the documents of a source into sentences, enough for `longest` tokens. Raises DataError if empty."""
    sentences: list[str] = []
    characters = 0
    for _, text in texts:
        for sentence in _SENTENCE.split(" ".join(text.split())):
            words = sentence.split(" ")
            parts = range(0, len(words), _LONGEST_SENTENCE)
            sentences += [f" {' '.join(words[start : start + _LONGEST_SENTENCE])}" for start in parts]
        characters += len(text)
        if characters > 12 * longest:  # more characters than these tokens can have
            break
    tokens = [ids for ids in pieces.several(sentences) if ids] if sentences else []
    if not tokens:
        raise DataError("The source is empty. Set --data to a source with text.")
    return Essay(tokens, sum(sentence.count(" ") for sentence in sentences))


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


def read_questions(path: Path, kind: str) -> QuestionSet:
    """Read a file of questions: kind squad (SQuAD 2.0's JSON) or hotpotqa (its JSON list). Raises DataError."""
    try:
        if path.stat().st_size > _LARGEST:
            raise DataError(f"{path} has more than {_LARGEST >> 20} MiB.")
        value = json.loads(path.read_text(encoding="utf-8"))
        found = _read_squad(value) if kind == "squad" else _read_hotpotqa(value)
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a file of {kind} questions: {reason_of(error)}.") from error
    if not found.questions:
        raise DataError(f"{path} has no answerable questions.")
    return found


def _read_squad(value: Any) -> QuestionSet:
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in value["data"]]
    documents = sorted({document for article in articles for document in article})
    index = {document: number for number, document in enumerate(documents)}
    questions = []
    for article in value["data"]:
        all_of_article = [index[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            own = index[paragraph["context"]]
            near = tuple(one for one in dict.fromkeys(all_of_article) if one != own)
            for one in paragraph["qas"]:
                answers = tuple(answer["text"] for answer in one["answers"])
                if not one.get("is_impossible") and answers:
                    questions.append(Question(one["question"], answers, (own,), near))
    return QuestionSet(questions, documents)


def _read_hotpotqa(value: Any) -> QuestionSet:
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in one["context"]] for one in value]
    documents = sorted({document for own in texts for document in own})
    index = {document: number for number, document in enumerate(documents)}
    questions = [
        Question(one["question"], (one["answer"],), tuple(dict.fromkeys(index[document] for document in own)))
        for one, own in zip(value, texts, strict=True)
    ]
    return QuestionSet(questions, documents)
