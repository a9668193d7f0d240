"""The text around the needles, as tokens: from a source or from repeated sentences."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropecli.data.documents import encode, special_tokens
from ropecli.errors import DataError

_MAX_TOKENS = 2**20
"""Tokens kept of a source. Independent of the lengths, so that the same seed gives the same text."""
_CHARACTERS = 2**18
"""Characters tokenized at once."""


TokenIds = tuple[int, ...]


class PieceTokenizer:
    """Tokenizes pieces of text as they would be inside a longer text, with any tokenizer.

    prefix: the special tokens that the tokenizer puts before every text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.prefix = special_tokens(tokenizer).prefix
        self._line_break = self.opening("\n")

    def opening(self, text: str) -> TokenIds:
        """Tokens of a piece at the beginning of the text."""
        return self.openings([text])[0]

    def openings(self, texts: Sequence[str]) -> list[TokenIds]:
        """The same for several pieces in one call, which is much faster than one by one."""
        encoded = encode(self.tokenizer, list(texts), add_special_tokens=False, return_attention_mask=False)
        return [tuple(ids) for ids in encoded["input_ids"]]

    def inside(self, text: str) -> TokenIds:
        """Tokens of a piece after others. On its own, SentencePiece would put a space before it."""
        return self.insides([text])[0]

    def insides(self, texts: Sequence[str]) -> list[TokenIds]:
        """The same for several pieces in one call."""
        before = self._line_break
        return [
            ids[len(before) :] if ids[: len(before)] == before else self.opening(text)
            for ids, text in zip(self.openings([f"\n{text}" for text in texts]), texts, strict=True)
        ]

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def common_beginning(sequences: Sequence[TokenIds]) -> int:
    """Length of the longest common prefix, tokens."""
    shortest = min(sequences, key=len)
    return next(
        (i for i, token in enumerate(shortest) if any(sequence[i] != token for sequence in sequences)), len(shortest)
    )


@dataclass(frozen=True)
class Haystack:
    """ids: shape (tokens,), int64, read cyclically. anywhere: whether to start at a random token or at the first."""

    ids: np.ndarray
    anywhere: bool

    def fingerprint(self) -> str:
        return hashlib.sha256(self.ids.astype("<i8").tobytes()).hexdigest()

    def stretch(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Shape (tokens,), int64."""
        start = int(rng.integers(len(self.ids))) if self.anywhere else 0
        return self.ids.take(np.arange(start, start + tokens), mode="wrap")


def repeat_sentences(sentences: str, pieces: PieceTokenizer, tokens: int) -> Haystack:
    """Repeat the sentences to at least `tokens` tokens."""
    times = 2 + tokens // len(pieces.inside(f" {sentences}"))
    return Haystack(np.array(pieces.inside(" ".join([sentences] * times)), dtype=np.int64), anywhere=False)


def read_haystack(
    texts: Iterable[tuple[str, str]], pieces: PieceTokenizer, advance: Callable[[], None] = lambda: None
) -> Haystack:
    """Read the documents of a source, joined by empty lines, up to 2**20 tokens. Raises DataError if there are none.

    Long documents are tokenized in pieces. The pieces depend only on the document, so the same source always gives the
    same tokens: each has up to 2**18 characters and ends before the last space or line break among them, if any.
    """
    parts: list[int] = []
    between = pieces.inside("\n\n")
    for _, text in texts:
        parts += between if parts else ()
        for index, piece in enumerate(_cut(text)):
            parts += pieces.inside(piece) if index else pieces.opening(piece)
            if len(parts) >= _MAX_TOKENS:
                break
        advance()
        if len(parts) >= _MAX_TOKENS:
            break
    if not parts:
        raise DataError("The source is empty. Set --data to a source with text.")
    return Haystack(np.array(parts[:_MAX_TOKENS], dtype=np.int64), anywhere=True)


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _CHARACTERS
        if stop < len(text):
            space = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
            stop = space if space > 0 else stop
        yield text[start:stop]
        start = stop
