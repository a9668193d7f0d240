"""Documents of tokens: a source, tokenized, with those that are too short left out and counted."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from ropecli.errors import DataError

_BATCH = 32
_CHARACTERS = 8
"""Of a text that are tokenized first, for each token that is used of it; as many times more where they give fewer."""


@dataclass(frozen=True)
class Document:
    """name: file or row. ids: shape (tokens,), int64.

    ends: shape (tokens,), int64, how many bytes of UTF-8 text each token's end leaves behind; None where unknown.
    """

    name: str
    ids: np.ndarray
    ends: np.ndarray | None = None

    def bytes_of(self, start: int, stop: int) -> int | None:
        """Bytes of text that the tokens start ≤ i < stop stand for."""
        if self.ends is None:
            return None
        return int(self.ends[stop - 1] - (self.ends[start - 1] if start else 0)) if start < stop else 0


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer's own. prefix, suffix: what it puts around every text (Llama's <s>). bos, eos: where it has them."""

    prefix: tuple[int, ...] = ()
    bos: int | None = None
    eos: int | None = None
    suffix: tuple[int, ...] = ()

    @property
    def first_scored(self) -> int:
        """How many tokens begin a document that are not scored: the special ones, or one with nothing before it."""
        return max(1, len(self.prefix))

    def ended(self, ids: np.ndarray) -> np.ndarray:
        """A document's ids without what is put after the text."""
        ends = len(self.suffix) > 0 and tuple(ids[-len(self.suffix) :].tolist()) == self.suffix
        return ids[: len(ids) - (len(self.suffix) if ends else 0)]

    def bare(self, ids: np.ndarray) -> np.ndarray:
        """A document's ids without what is put before and after the text."""
        return self.ended(ids)[len(self.prefix) :]


@dataclass(frozen=True)
class Documents:
    """The documents that are long enough, and how many were not."""

    kept: tuple[Document, ...]
    too_short: int
    special: SpecialTokens = SpecialTokens()

    @property
    def count(self) -> int:
        return len(self.kept) + self.too_short

    def at_least(self, tokens: int) -> "Documents":
        """Without the documents that have fewer tokens."""
        kept = tuple(document for document in self.kept if len(document.ids) >= tokens)
        return replace(self, kept=kept, too_short=self.count - len(kept))

    def fingerprint(self, length: int | None = None) -> str:
        """sha256 over the first `length` token ids of every document, or over all of them."""
        sha = hashlib.sha256()
        for document in self.kept:
            ids = document.ids[:length]
            sha.update(len(ids).to_bytes(8, "little"))
            sha.update(ids.astype("<i8").tobytes())
        return sha.hexdigest()


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
    """Tokenizes (name, text) pairs, special tokens included, until `most` documents have `least` tokens or more.

    cut: keep only so many tokens of each; where the tokenizer allows, no more than that is tokenized. count_bytes: fill
    in Document.ends, where the tokenizer tells which characters a token stands for. advance: called after each
    document. Raises DataError where no document has `least` tokens, saying how long the longest is.
    """
    kept: list[Document] = []
    lengths = [0]
    for document in tokenize(texts, tokenizer, count_bytes, enough=max(cut, least) if cut else None):
        lengths.append(len(document.ids))
        advance()
        if len(document.ids) >= least:
            kept.append(_cut(document, cut) if cut else document)
            if most and len(kept) == most:
                break
    if len(lengths) == 1:
        raise DataError("The source holds no document.")
    if not kept:
        raise DataError(
            f"No document is as long as {least} tokens; the longest of {len(lengths) - 1} has {max(lengths)}. "
            "Ask for fewer, or give longer documents."
        )
    return Documents(tuple(kept), len(lengths) - 1 - len(kept), special_tokens(tokenizer))


def _cut(document: Document, tokens: int) -> Document:
    # copies, since a view would keep the whole document
    ends = None if document.ends is None else document.ends[:tokens].copy()
    return Document(document.name, document.ids[:tokens].copy(), ends)


def special_tokens(tokenizer) -> SpecialTokens:
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    if not bare:  # it knows no letters; what it gives for them stands before every text
        return SpecialTokens(tuple(whole), tokenizer.bos_token_id, tokenizer.eos_token_id)
    starts = range(len(whole) - len(bare) + 1)
    start = next((start for start in starts if whole[start : start + len(bare)] == bare), 0)
    prefix, suffix = tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return SpecialTokens(prefix, tokenizer.bos_token_id, tokenizer.eos_token_id, suffix)


def tokenize(
    texts: Iterable[tuple[str, str]], tokenizer, count_bytes: bool = False, enough: int | None = None
) -> Iterator[Document]:
    """Every text as a document, in batches, which fast tokenizers spread over the cores. See read_documents.

    enough: how many tokens of each document are used. Where the tokenizer splits the text into words first, a longer
    document may then end after that many, which are those that the whole text gives.
    """
    texts = iter(texts)
    if tokenizer.is_fast and any(len(token.split()) > 1 for token in tokenizer.get_added_vocab()):
        enough = None  # such a token may reach over any place where the text is cut
    while batch := list(islice(texts, _BATCH)):
        names, bodies = zip(*batch, strict=True)
        if not tokenizer.is_fast:
            for name, ids in zip(names, tokenizer(list(bodies), verbose=False)["input_ids"], strict=True):
                yield Document(name, np.array(ids, dtype=np.int64))
            continue
        for name, body, (encoding, count) in zip(names, bodies, _encode(bodies, tokenizer, enough), strict=True):
            ends = _byte_ends(body, encoding.offsets[:count]) if count_bytes else None
            yield Document(name, np.array(encoding.ids[:count], dtype=np.int64), ends)


def _encode(texts: Sequence[str], tokenizer, enough: int | None) -> list[tuple[Any, int]]:
    """Each text's encoding, of all of it or of a head, and how many of its tokens are those of the whole text.

    enough: the tokens that a head must give; None: no heads.
    """
    found: dict[int, tuple[Any, int]] = {}
    characters = None if enough is None else _CHARACTERS * enough
    while left := [index for index in range(len(texts)) if index not in found]:
        heads = [texts[index][:characters] for index in left]
        for index, head, encoding in zip(left, heads, tokenizer(heads, verbose=False).encodings, strict=True):
            whole = len(head) == len(texts[index])
            count = len(encoding) if whole else _settled(head, encoding)
            if whole or count >= (enough or 0):
                found[index] = encoding, count
        characters = characters and _CHARACTERS * characters
    return [found[index] for index in range(len(texts))]


def _settled(head: str, encoding) -> int:
    """How many tokens of the head are the whole text's: those of words that end before the last two of the head.

    Pre-tokenizers look no further than the white space after a word and the character after that. Where there is none,
    all tokens are of one word, and none is settled.
    """
    parts = head.rsplit(maxsplit=2)
    words, stops = encoding.word_ids, [stop for _, stop in encoding.offsets]
    end = len(parts[0]) if len(parts) == 3 else 0
    count = next((index for index, stop in enumerate(stops) if stop > end), 0)
    while count and words[count - 1] == words[count]:
        count -= 1
    return count


def _byte_ends(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """offsets: (start, stop) of each token, characters; (0, 0) for a special token, which stands for nothing."""
    text = text[: max((stop for _, stop in offsets), default=0)]
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000).astype(np.int64)
    bytes_before = np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])
    stops = np.array([stop for _, stop in offsets], dtype=np.int64)
    return bytes_before[np.maximum.accumulate(stops)] if len(stops) else stops
