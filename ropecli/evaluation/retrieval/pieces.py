"""Pieces of text as the tokens they are inside a longer text, for any tokenizer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ropecli.data.documents import special_tokens

Tokens = tuple[int, ...]


class Pieces:
    """A tokenizer, asked for pieces. prefix: the special tokens that it puts before every text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.prefix = special_tokens(tokenizer).prefix
        self._line_break = self.opening("\n")

    def opening(self, text: str) -> Tokens:
        """Of a piece that begins the text."""
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def inside(self, text: str) -> Tokens:
        """Of a piece that others precede: SentencePiece would put a space before it if it were alone."""
        before, both = self._line_break, self.opening(f"\n{text}")
        return both[len(before) :] if both[: len(before)] == before else self.opening(text)

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def common_beginning(sequences: Sequence[Tokens]) -> int:
    """How many tokens all sequences begin with alike."""
    shortest = min(sequences, key=len)
    return next((i for i, token in enumerate(shortest) if any(one[i] != token for one in sequences)), len(shortest))
