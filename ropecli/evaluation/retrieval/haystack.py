"""The text around the needles, in tokens: from a source, or from repeated sentences."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropecli.data.documents import special_tokens
from ropecli.errors import DataError

_MOST = 2**20
"""Tokens kept of a source; a fixed number, so that the same seed gives the same text whatever the lengths."""
_CHARACTERS = 2**18
"""Of a document that are tokenized at once."""


TokenIds = tuple[int, ...]


class PieceTokenizer:
    """Gives pieces of text the tokens that they have inside a longer text, for any tokenizer.

    prefix: the special tokens that it puts before every text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.prefix = special_tokens(tokenizer).prefix
        self._line_break = self.opening("\n")

    def opening(self, text: str) -> TokenIds:
        """Of a piece that begins the text."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def inside(self, text: str) -> TokenIds:
        """Of a piece that others precede: SentencePiece would put a space before it if it were alone."""
        before, both = self._line_break, self.opening(f"\n{text}")
        return both[len(before) :] if both[: len(before)] == before else self.opening(text)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def common_beginning(sequences: Sequence[TokenIds]) -> int:
    """How many tokens all sequences begin with alike."""
    shortest = min(sequences, key=len)
    return next((i for i, token in enumerate(shortest) if any(one[i] != token for one in sequences)), len(shortest))


@dataclass(frozen=True)
class Haystack:
    """ids: shape (tokens,), int64; read in a ring. anywhere: whether a stretch begins anywhere, or at the beginning."""

    ids: np.ndarray
    anywhere: bool

    def stretch(self, tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Shape (tokens,), int64."""
        start = int(rng.integers(len(self.ids))) if self.anywhere else 0
        return self.ids.take(np.arange(start, start + tokens), mode="wrap")


def repeat_sentences(sentences: str, pieces: PieceTokenizer, tokens: int) -> Haystack:
    """The same sentences again and again, at least `tokens` tokens long."""
    times = 2 + tokens // len(pieces.inside(f" {sentences}"))
    return Haystack(np.array(pieces.inside(" ".join([sentences] * times)), dtype=np.int64), anywhere=False)


def read_haystack(
    texts: Iterable[tuple[str, str]], pieces: PieceTokenizer, advance: Callable[[], None] = lambda: None
) -> Haystack:
    """The documents of a source, joined by empty lines, up to a million tokens. Raises DataError for none.

    Long documents are tokenized in pieces, and no further than to that million. The pieces depend on the document
    alone, so that the same source always gives the same tokens: each has up to 2**18 characters, and ends before the
    last space or line break among them, or at their end where there is none.
    """
    parts: list[int] = []
    between = pieces.inside("\n\n")
    for _, text in texts:
        parts += between if parts else ()
        for index, piece in enumerate(_cut(text)):
            parts += pieces.inside(piece) if index else pieces.opening(piece)
            if len(parts) >= _MOST:
                break
        advance()
        if len(parts) >= _MOST:
            break
    if not parts:
        raise DataError("The source holds no text to hide a needle in. Give another --data.")
    return Haystack(np.array(parts[:_MOST], dtype=np.int64), anywhere=True)


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + _CHARACTERS
        if stop < len(text):
            space = max(text.rfind(" ", start + 1, stop), text.rfind("\n", start + 1, stop))
            stop = space if space > 0 else stop
        yield text[start:stop]
        start = stop
