"""Tokenizes a source into documents; skips and counts those that are too short."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ropecli.errors import CheckpointError, DataError, reason_of
from ropecli.hashing import digest

_BATCH = 32
_CHARACTERS = 8
"""Characters to tokenize first per token needed; multiplied by this again while they yield too few tokens."""


@dataclass(frozen=True)
class Document:
    """name: file or row. ids: shape (tokens,), int64.

    ends: shape (tokens,), int64, UTF-8 bytes of text up to each token's end; None where unknown. trained: shape
    (tokens,), bool, whether to train on each token; None for all. turns: of a conversation, shape (turns,), int64, the
    first token of each; None of a text. lost: the first part that the chat template leaves out. unused: columns and
    keys of messages that nothing reads.
    """

    name: str
    ids: np.ndarray
    ends: np.ndarray | None = None
    trained: np.ndarray | None = None
    turns: np.ndarray | None = None
    lost: str = ""
    unused: frozenset[str] = frozenset()

    def bytes_of(self, start: int, stop: int) -> int | None:
        """Bytes of text in the tokens start ≤ i < stop."""
        if self.ends is None:
            return None
        return int(self.ends[stop - 1] - (self.ends[start - 1] if start else 0)) if start < stop else 0


@dataclass(frozen=True)
class SpecialTokens:
    """prefix, suffix: ids that the tokenizer puts around every text (Llama's <s>)."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    @property
    def first_scored(self) -> int:
        """Unscored tokens at the start of a document: the prefix, or the first token, which has no context."""
        return max(1, len(self.prefix))

    def ended(self, ids: np.ndarray) -> np.ndarray:
        """A document's ids without the suffix."""
        ends = len(self.suffix) > 0 and tuple(ids[-len(self.suffix) :].tolist()) == self.suffix
        return ids[: len(ids) - (len(self.suffix) if ends else 0)]

    def bare(self, ids: np.ndarray) -> np.ndarray:
        """A document's ids without prefix and suffix."""
        return self.ended(ids)[len(self.prefix) :]


@dataclass(frozen=True)
class Documents:
    """The documents that are long enough. too_short: number of skipped ones."""

    kept: tuple[Document, ...]
    too_short: int
    special: SpecialTokens = SpecialTokens()

    @property
    def names(self) -> list[str]:
        return [document.name for document in self.kept]

    @property
    def count(self) -> int:
        return len(self.kept) + self.too_short

    def first(self, tokens: int) -> "Documents":
        """The first tokens of each document; drops documents with fewer."""
        kept = tuple(_cut(document, tokens) for document in self.kept if len(document.ids) >= tokens)
        return replace(self, kept=kept, too_short=self.count - len(kept))

    def fingerprint(self, length: int | None = None) -> str:
        """sha256 over the first `length` token ids of every document, or over all of them."""
        return digest(*(document.ids[:length] for document in self.kept))


def read_documents(
    texts: Iterable[tuple[str, str]],
    tokenizer,
    least: int,
    *,
    most: int | None = None,
    cut: int | None = None,
    count_bytes: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Documents:
    """Tokenize (name, text) pairs with special tokens until `most` documents have at least `least` tokens.

    cut: keep this many tokens of each document; where the tokenizer allows, tokenize no more than that. count_bytes:
    fill in Document.ends, if the tokenizer reports character offsets. advance: called after each document. Raises
    DataError if no document has `least` tokens.
    """
    kept: list[Document] = []
    lengths: list[int] = []
    for document in tokenize(texts, tokenizer, count_bytes, enough=max(cut, least) if cut else None, most=most):
        lengths.append(len(document.ids))
        advance()
        if len(document.ids) >= least:
            kept.append(_cut(document, cut) if cut else document)
            if most and len(kept) == most:
                break
    if not kept:
        raise DataError(none_long_enough(least, lengths))
    return Documents(tuple(kept), len(lengths) - len(kept), special_tokens(tokenizer))


def none_long_enough(least: int, lengths: Sequence[int] | np.ndarray) -> str:
    if not len(lengths):
        return "The source contains no documents."
    return (
        f"No document has at least {least} tokens; the longest of {len(lengths)} has {max(lengths)}. "
        "Use a shorter length or longer documents."
    )


def _cut(document: Document, tokens: int) -> Document:
    # copy: a view would keep the whole document in memory
    ends = None if document.ends is None else document.ends[:tokens].copy()
    return Document(document.name, document.ids[:tokens].copy(), ends)


def encode(tokenizer, text: str | list[str], **options: Any):
    """Call the tokenizer. Raises CheckpointError if it fails, as with a tokenizer_class that its files do not fit."""
    try:
        return tokenizer(text, verbose=False, **options)
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(
            f"The tokenizer {tokenizer.name_or_path}, a {type(tokenizer).__name__}, cannot encode text: "
            f"{reason_of(error)}. Check tokenizer_class in its tokenizer_config.json."
        ) from error


def special_tokens(tokenizer) -> SpecialTokens:
    """Find the special tokens by tokenizing a short text with and without them."""
    bare = encode(tokenizer, "a", add_special_tokens=False)["input_ids"]
    ids = encode(tokenizer, "a")["input_ids"]
    starts = range(len(ids) - len(bare) + 1)
    start = next((start for start in starts if ids[start : start + len(bare)] == bare), 0)
    return SpecialTokens(tuple(ids[:start]), tuple(ids[start + len(bare) :]))


def tokenize(
    texts: Iterable[tuple[str, str]],
    tokenizer,
    count_bytes: bool = False,
    enough: int | None = None,
    most: int | None = None,
) -> Iterator[Document]:
    """Tokenize texts in batches, which fast tokenizers spread over the cores. See read_documents.

    enough: tokens needed of each document. If the tokenizer splits the text into words first, a longer document may
    end after that many tokens; they equal the first tokens of the whole text. most: documents needed.
    """
    size = min(most or _BATCH, _BATCH)
    special = special_tokens(tokenizer)
    prefix, suffix = ("".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (special.prefix, special.suffix))
    # a text may have them already, as exports of training data do
    texts = ((name, text.removeprefix(prefix).removesuffix(suffix)) for name, text in texts)
    if tokenizer.is_fast and any(len(token.split()) > 1 for token in tokenizer.get_added_vocab()):
        enough = None  # such a token may span any place where the text is cut
    while batch := list(islice(texts, size)):
        size = _BATCH
        names, bodies = zip(*batch, strict=True)
        if not tokenizer.is_fast:
            for name, ids in zip(names, encode(tokenizer, list(bodies))["input_ids"], strict=True):
                yield Document(name, np.array(ids, dtype=np.int64))
            continue
        for name, body, (encoding, count) in zip(names, bodies, _encode(bodies, tokenizer, enough), strict=True):
            ends = _byte_ends(body, encoding.offsets[:count]) if count_bytes else None
            yield Document(name, np.array(encoding.ids[:count], dtype=np.int64), ends)


def _encode(
    texts: Sequence[str], tokenizer, enough: int | None, characters: int | None = None
) -> list[tuple[Any, int]]:
    """(encoding, number of tokens that equal those of the whole text) for each text or a head of it.

    enough: tokens that a head must yield; None to encode whole texts. characters: of the heads.
    """
    characters = characters or (None if enough is None else _CHARACTERS * enough)
    heads, pairs = [text[:characters] for text in texts], []
    for text, head, encoding in zip(texts, heads, encode(tokenizer, heads).encodings, strict=True):
        if len(head) == len(text):
            pairs.append((encoding, len(encoding)))
        elif (count := _final_tokens(head, encoding)) >= (enough or 0):
            pairs.append((encoding, count))
        else:
            pairs += _encode([text], tokenizer, enough, _CHARACTERS * len(head))
    return pairs


def _final_tokens(head: str, encoding) -> int:
    """Number of tokens of the head that equal the whole text's: those of words before the head's last two words.

    Pre-tokenizers look no further than the white space after a word and one character more. Without white space, all
    tokens belong to one word and none is final.
    """
    parts = head.rsplit(maxsplit=2)
    words, stops = encoding.word_ids, [stop for _, stop in encoding.offsets]
    end = len(parts[0]) if len(parts) == 3 else 0
    count = next((index for index, stop in enumerate(stops) if stop > end), 0)
    while count and words[count - 1] == words[count]:
        count -= 1
    return count


def _byte_ends(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """offsets: (start, stop) of each token, characters; (0, 0) for a special token, which has no text."""
    text = text[: max((stop for _, stop in offsets), default=0)]
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000).astype(np.int64)
    bytes_before = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
    stops = np.array([stop for _, stop in offsets], dtype=np.int64)
    return bytes_before[np.maximum.accumulate(stops)] if len(stops) else stops
