"""The pieces of prompts, as tokens: of a longer text, of a chat template, and the text around a needle."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropecli.data.documents import encode, special_tokens, tokenize
from ropecli.errors import DataError, reason_of
from ropecli.signature import token_count

TokenIds = tuple[int, ...]

_MAX_TOKENS = 2**20
"""Tokens kept of a source. Independent of the lengths, so that the same seed gives the same text."""
_MARK = "ROPECLI-MESSAGE"
THOUGHT, THOUGHT_ENDS = "<think>", "</think>"
_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates: of Qwen and most others; of DeepSeek and Granite."""


@dataclass(frozen=True)
class Frame:
    """The text that a chat template puts around a user's message.

    before: up to the message, with the special tokens. after: up to the assistant's answer. thought: tokens that a
    thought may take after that, before what begins the answer; 0: what begins the answer follows at once.
    """

    before: str
    after: str
    thought: int = 0

    @property
    def opens_thought(self) -> bool:
        return self.after.rstrip().endswith(THOUGHT)


def find_frame(tokenizer: Any, choice: str, thinking: str | None = None) -> Frame | None:
    """The frame of the tokenizer's chat template. choice: auto, if it has one; none, never.

    thinking: off, or the tokens of a thought. Raises DataError for a template that fails or changes the message, or
    cannot do that.
    """
    if choice == "none" or not getattr(tokenizer, "chat_template", None):
        if thinking:
            raise DataError("--thinking needs a chat template. Use a checkpoint with one, and --chat-template auto.")
        return None
    message = {"role": "user", "content": _MARK}

    def render(**switches: bool) -> str:
        how = {"tokenize": False, "add_generation_prompt": True, **switches}
        try:
            return str(tokenizer.apply_chat_template([message], **how))
        except Exception as error:  # a template is a program
            raise DataError(f"The chat template fails: {reason_of(error)}. Use --chat-template none.") from error

    text = render(**dict.fromkeys(_SWITCHES, thinking != "off") if thinking else {})
    if thinking == "off" and text == render(**dict.fromkeys(_SWITCHES, True)):
        raise DataError("The chat template has no switch for thinking. Use --thinking 2k to have a thought first.")
    before, mark, after = text.partition(_MARK)
    if not mark or _MARK in after:
        raise DataError("The chat template does not contain the message once. Use --chat-template none.")
    return Frame(before, after, int(token_count(thinking)) if thinking and thinking != "off" else 0)


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
        return self._encoded([text])[0]

    def head(self, text: str, frame: Frame | None) -> TokenIds:
        """Tokens of the beginning of a prompt, with the special tokens."""
        return self.prefix + self.opening(text) if frame is None else self.opening(frame.before + text)

    def inside(self, text: str) -> TokenIds:
        """Tokens of a piece after others. On its own, SentencePiece would put a space before it."""
        return self.each_inside([text])[0]

    def each_inside(self, texts: Sequence[str]) -> list[TokenIds]:
        """The same for several pieces in one call, which is much faster."""
        before, encoded = self._line_break, self._encoded([f"\n{text}" for text in texts]) if texts else []
        return [
            ids[len(before) :] if ids[: len(before)] == before else self.opening(text)
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _encoded(self, texts: Sequence[str]) -> list[TokenIds]:
        encoded = encode(self.tokenizer, list(texts), add_special_tokens=False, return_attention_mask=False)
        return [tuple(ids) for ids in encoded["input_ids"]]

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(frozen=True)
class Haystack:
    """ids: shape (tokens,), int64, read cyclically. anywhere: whether to start at a random token or at the first."""

    ids: np.ndarray
    anywhere: bool

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
    """Read the documents of a source, joined by empty lines, up to 2**20 tokens. Raises DataError if there are none."""
    ids: list[int] = []
    special, between = special_tokens(pieces.tokenizer), pieces.inside("\n\n")
    for document in tokenize(texts, pieces.tokenizer, enough=_MAX_TOKENS):
        ids += [*(between if ids else ()), *special.bare(document.ids).tolist()]
        advance()
        if len(ids) >= _MAX_TOKENS:
            break
    if not ids:
        raise DataError("The source is empty. Set --data to a source with text.")
    return Haystack(np.array(ids[:_MAX_TOKENS], dtype=np.int64), anywhere=True)
