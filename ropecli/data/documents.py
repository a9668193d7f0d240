"""Documents of tokens: a source, tokenized, with those that are too short left out and counted."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ropecli.errors import DataError

_BATCH = 32


@dataclass(frozen=True)
class Document:
    """name: file or row. ids: shape (tokens,), int64."""

    name: str
    ids: np.ndarray


@dataclass(frozen=True)
class Documents:
    """The documents that are long enough, and how many were not.

    prefix: the special tokens that the tokenizer puts before every text (Llama's <s>).
    """

    kept: tuple[Document, ...]
    too_short: int
    prefix: tuple[int, ...] = ()

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
    length: int,
    *,
    most: int | None = None,
    truncate: bool = False,
    advance: Callable[[str], None] = lambda name: None,
) -> Documents:
    """Tokenizes (name, text) pairs, special tokens included, until `most` documents reach `length` tokens.

    truncate: keep only the first `length` tokens of each, so that memory stays small. advance: called with each
    document's name. Raises DataError where none does, saying how long the longest is.
    """
    kept: list[Document] = []
    lengths = [0]
    for name, ids in _tokenize(texts, tokenizer):
        lengths.append(len(ids))
        advance(name)
        if len(ids) >= length:
            kept.append(Document(name, ids[:length].copy() if truncate else ids))
            if most and len(kept) == most:
                break
    if len(lengths) == 1:
        raise DataError("The source holds no document.")
    if not kept:
        raise DataError(
            f"No document is as long as {length} tokens; the longest of {len(lengths) - 1} has {max(lengths)}. "
            "Give shorter lengths, or longer documents."
        )
    return Documents(tuple(kept), len(lengths) - 1 - len(kept), _prefix(tokenizer, kept[0].ids))


def _prefix(tokenizer, ids: np.ndarray) -> tuple[int, ...]:
    special = tokenizer("")["input_ids"]  # some tokenizers put theirs at the end, or nowhere
    return tuple(special) if special and list(ids[: len(special)]) == list(special) else ()


def _tokenize(texts: Iterable[tuple[str, str]], tokenizer) -> Iterator[tuple[str, np.ndarray]]:
    """In batches, which fast tokenizers spread over the cores."""
    texts = iter(texts)
    while batch := list(islice(texts, _BATCH)):
        names, bodies = zip(*batch, strict=True)
        for name, ids in zip(names, tokenizer(list(bodies), verbose=False)["input_ids"], strict=True):
            yield name, np.array(ids, dtype=np.int64)
