"""Key tokens for LongPPL: the tokens that a model predicts well only with a long context.

Fang et al. 2025, "What is Wrong with Perplexity for Long-context Language Modeling?", arXiv:2410.23771, section 3. An
evaluator model reads each document whole, and again with a short context. A token is a key token if the long context
raises its log-probability by more than `min_gain`, and its loss with the long context is below `max_loss`. Key tokens
are stored as intervals of characters, so that a model with any tokenizer can be scored on them.

As in the authors' package, longppl 0.3.0: the short context grows from K to K + stride − 1 tokens within a window, and
windows do not start with <s>; a token is key for another tokenizer if it lies within adjoining key tokens. Unlike
there, the judged model's text starts with what its tokenizer puts before every text, such as <s>.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Interval, Len

from ropecli.atomic import sibling
from ropecli.checkpoint.files import read_file
from ropecli.data.documents import Document, Documents, read_documents, special_tokens
from ropecli.errors import DataError, MethodError
from ropecli.evaluation.driver import Job, Key, Task, collect
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.protocols import Protocol, ShortContext, Window, short_context
from ropecli.evaluation.readers.reader import Reader
from ropecli.evaluation.report import write_report
from ropecli.evaluation.statistics import Count, TokenCount
from ropecli.evaluation.subject import Readers, Subject, open_subject, refuse_attention
from ropecli.evaluation.texts import TextChoice
from ropecli.live.loading import load_tokenizer
from ropecli.messages import progress_bar, say, warn
from ropecli.resume import remove_state

MIN_GAIN = 2.0
MAX_LOSS = 2.0
_FEW = 100
"""Fewer key tokens give wide intervals."""

Texts = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class KeyDocument:
    """The key tokens of one text. sha256: of the whole text. characters: how much of it the evaluator read.

    intervals: (start, stop) of adjoining key tokens, characters, ascending.
    """

    name: str
    sha256: str
    characters: Count
    intervals: tuple[tuple[Count, Count], ...]


@dataclass(frozen=True)
class Keys:
    """The key tokens of a data set, for any number of models. digest: of the evaluator.

    length: tokens that the evaluator read of each document. short_context, stride: tokens, see ShortContext. min_gain,
    max_loss: nats. checksum: of all else, written by write_keys; None in files of earlier releases.
    """

    evaluator: str
    digest: str
    length: TokenCount
    short_context: TokenCount
    stride: TokenCount
    min_gain: float
    max_loss: float
    documents: Annotated[tuple[KeyDocument, ...], Len(1)]
    kind: Literal["longppl-keys"] = "longppl-keys"
    schema_version: Annotated[int, Interval(ge=1, le=1)] = 1
    checksum: str | None = field(default=None, compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine the key tokens, for reports."""
        names = ("evaluator", "digest", "length", "short_context", "stride", "min_gain", "max_loss")
        return {name: getattr(self, name) for name in names}

    def computed_checksum(self) -> str:
        return fingerprint(json.dumps(asdict(replace(self, checksum=None))))

    def select(self, texts: Texts) -> Iterator[tuple[str, str]]:
        """The texts that have keys, cut to what the evaluator read. Raises DataError for a text that is another."""
        left = {document.name: document for document in self.documents}
        for name, text in texts:
            if (document := left.pop(name, None)) is None:
                continue
            if fingerprint(text) != document.sha256:
                raise DataError(f"The key tokens were found in another text of {name}. Find them again.")
            yield name, text[: document.characters]
            if not left:
                return
        raise DataError(f"The key tokens were found in other data: {next(iter(left))} is not in --data.")

    def mark(self, documents: Documents) -> tuple[Documents, int]:
        """Fill in Document.keys of documents that were read from `select` with spans. Also returns how many."""
        intervals = {document.name: document.intervals for document in self.documents}
        marked, count = [], 0
        for document in documents.kept:
            keys = positions_within(_spans_of(document), intervals[document.name], documents.special.first_scored)
            marked.append(replace(document, spans=None, keys=keys))
            count += len(keys)
        return replace(documents, kept=tuple(marked)), count


class FindKeys(Task):
    """Finds the key tokens of each document with an evaluator: the positions, ascending.

    documents: each has `length` tokens.
    """

    name = "finding key tokens"
    answers = False

    def __init__(self, documents: Documents, context: ShortContext, length: int) -> None:
        self.documents, self.context, self.length = documents, context, length

    def request(self) -> dict[str, Any]:
        return {"task": self.name, "data": self.documents.fingerprint(), **asdict(self.context)}

    def longest(self) -> tuple[np.ndarray, int, int]:
        largest = max(int(document.ids.max()) for document in self.documents.kept)
        return self.documents.kept[0].ids, self.length, largest

    def samples(self, *, one_pass: bool) -> list[Key]:
        # a key of its own for each document: its windows fill the batches
        return [(index, self.length) for index in range(len(self.documents.kept))]

    def tokens(self, key: Key) -> int:
        return self.length + sum(stop - start for start, stop in self.context.windows(self.length))

    def score(self, reader: Reader, batch: Sequence[Key]) -> list[Any]:
        return [self._positions(reader, self.documents.kept[index].ids) for index, _ in batch]

    def _positions(self, reader: Reader, ids: np.ndarray) -> list[int]:
        windows = [Window(ids, len(ids) - 1, len(ids))]
        for start, stop in self.context.windows(len(ids)):
            windows.append(Window(ids[start:stop], stop - start - self.context.tokens, stop))
        losses = list(reader.losses(windows))
        long, short = losses[0][self.context.first - 1 :], np.concatenate(losses[1:])
        is_key = (short - long > MIN_GAIN) & (long < MAX_LOSS)
        return (self.context.first + np.flatnonzero(is_key)).tolist()


def _spans_of(document: Document) -> np.ndarray:
    if document.spans is None:
        raise DataError("longppl needs a fast tokenizer, which reports the characters of each token.")
    return document.spans


def positions_within(spans: np.ndarray, intervals: tuple[tuple[int, int], ...], first: int = 0) -> np.ndarray:
    """Positions, from `first` on, of the tokens that lie within one of the intervals.

    spans: shape (tokens, 2). intervals: ascending, without overlap. Returns shape (keys,), int64.
    """
    if not intervals:
        return np.zeros(0, dtype=np.int64)
    starts, stops = np.array(intervals, dtype=np.int64).T
    interval = np.searchsorted(starts, spans[:, 0], side="right") - 1
    within = (interval >= 0) & (spans[:, 1] <= stops[interval]) & (spans[:, 0] < spans[:, 1])
    within[:first] = False
    return np.flatnonzero(within)


def _merged(spans: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Join adjoining spans. spans: shape (keys, 2), ascending."""
    merged: list[tuple[int, int]] = []
    for start, stop in spans.tolist():
        if start == stop:  # a special token
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def write_keys(path: Path, keys: Keys) -> None:
    """Write the file of key tokens atomically. Raises OSError."""
    write_report(path, asdict(replace(keys, checksum=keys.computed_checksum())))


def read_keys(path: Path) -> Keys:
    """Read a file that write_keys wrote. Raises DataError."""
    from pydantic import TypeAdapter

    keys: Keys = read_file(path, TypeAdapter(Keys).validate_json)
    for document in keys.documents:
        borders = [0, *(border for interval in document.intervals for border in interval), document.characters]
        if borders != sorted(borders):
            raise DataError(f"{path} is damaged: the intervals of {document.name} overlap or are reversed.")
    if keys.checksum not in (None, keys.computed_checksum()):
        raise DataError(f"{path} is damaged: it does not match its checksum. Find the key tokens again.")
    return keys


def refuse_key_options(protocol: Protocol, evaluator: str | None, file: Path | None) -> None:
    """Raises MethodError for key tokens of another protocol, and for longppl without any."""
    if protocol.name != "longppl" and (evaluator or file):
        raise MethodError(f"--evaluator and --keys apply only to the protocol longppl, not to {protocol.name}.")
    if protocol.name == "longppl" and not (evaluator or file):
        raise MethodError(
            "The protocol longppl needs --evaluator CHECKPOINT, which finds the key tokens, or --keys FILE, which an "
            "earlier run wrote."
        )


def get_keys(
    evaluator: str | None,
    path: Path | None,
    texts: TextChoice,
    lengths: list[int],
    readers: Readers,
    workers: Workers,
    *,
    drop_rare: bool,
    output: Path | None = None,
) -> tuple[Keys, list[int]]:
    """Read the key tokens if `path` exists; otherwise find them, and write them to `path` if it is given.

    lengths: tokens, ascending. drop_rare: the user asked for none of them. output: of the command; progress is saved
    next to it if there is no `path`. Returns the lengths to measure too.
    """
    subject = open_subject(evaluator) if evaluator else None
    if path and path.exists():
        keys = read_keys(path)
        if subject and not subject.checkpoint.matches(keys.digest):
            raise MethodError(
                f"{path} has the key tokens of another evaluator, {keys.evaluator}. Remove --evaluator to use them, or "
                "give another --keys FILE."
            )
        if drop_rare:
            lengths = [length for length in lengths if length <= keys.length] or [keys.length]
        if lengths[-1] > keys.length:
            raise MethodError(
                f"{path} has the key tokens of up to {keys.length} tokens; --lengths asks for {lengths[-1]}. Use "
                "shorter lengths, or find key tokens again with --evaluator and another --keys FILE."
            )
        return keys, lengths
    if subject is None:
        raise DataError(f"--keys {path} does not exist. To find key tokens and write them there, add --evaluator.")
    progress = path or (sibling(output, ".keys") if output else None)
    keys, lengths = _find(subject, texts, lengths, readers, workers, progress, drop_rare=drop_rare)
    if workers.first and not any(document.intervals for document in keys.documents):
        remove_state(progress)  # it would be in the way of other lengths and data
    _refuse_no_keys(keys, sum(len(document.intervals) for document in keys.documents))
    if path and workers.first:
        write_keys(path, keys)
        remove_state(path)
    return keys, lengths


def _find(
    subject: Subject,
    choice: TextChoice,
    lengths: list[int],
    readers: Readers,
    workers: Workers,
    output: Path | None,
    *,
    drop_rare: bool,
) -> tuple[Keys, list[int]]:
    checkpoint = subject.checkpoint
    refuse_attention(subject, readers.settings["attn"])
    for warning in subject.warnings:
        warn(f"the evaluator: {warning}")
    context = short_context(subject.positions.pretraining_length)
    hashes: dict[str, str] = {}

    def hashed() -> Iterator[tuple[str, str]]:
        for name, text in choice.texts():
            hashes[name] = fingerprint(text)
            yield name, text

    tokenizer = load_tokenizer(checkpoint)
    documents, lengths = choice.read(
        tokenizer, lengths, Protocol("longppl"), drop_rare=drop_rare, texts=hashed(), keep_spans=True
    )
    if lengths[-1] <= context.first:
        raise DataError(
            f"The longest length is {lengths[-1]} tokens; longppl needs more than {context.first}, because the "
            f"evaluator {checkpoint.name} has a short context of {context.tokens}."
        )
    if lengths[-1] > (most := subject.positions.context_length):
        warn(
            f"The evaluator reads {lengths[-1]} tokens, but its context length is {most}: it may "
            "find few or wrong key tokens."
        )
    job = Job(subject, [FindKeys(documents, context, lengths[-1])], tokenizer)
    ((_, _, values, _),) = collect([job], readers, output, workers)
    key_documents = []
    for document, positions in zip(documents.kept, values.values(), strict=True):
        spans = _spans_of(document)
        intervals = _merged(spans[np.array(positions, dtype=np.int64)])
        key_documents.append(KeyDocument(document.name, hashes[document.name], int(spans.max()), intervals))
    read_with = (lengths[-1], context.tokens, context.stride, MIN_GAIN, MAX_LOSS)
    return Keys(checkpoint.name, checkpoint.digest(), *read_with, tuple(key_documents)), lengths


def _refuse_no_keys(keys: Keys, count: int) -> None:
    if not count:
        raise DataError(
            f"The evaluator {keys.evaluator} found no key tokens in {len(keys.documents)} documents. Use longer "
            "lengths, other data, or an evaluator that uses its context better."
        )


def read_marked(texts: TextChoice, tokenizer: Any, keys: Keys) -> Documents:
    """The documents that have key tokens, cut to the text that the evaluator read. Says how many tokens are key."""
    special = special_tokens(tokenizer)
    with progress_bar("reading documents", None) as step:
        documents = read_documents(
            keys.select(texts.source.texts()),  # ends with the last document that has keys
            tokenizer,
            special.first_scored + 1 + len(special.suffix),
            most=texts.max_documents,
            count_bytes=True,
            keep_spans=True,
            advance=step,
        )
    documents, count = keys.mark(documents)
    tokens = sum(len(document.ids) for document in documents.kept)
    _refuse_no_keys(keys, count)
    say(
        f"{count:,} of {tokens:,} tokens in {len(documents.kept)} documents are key tokens ({count / tokens:.1%}), "
        f"found by {keys.evaluator} with {keys.length:,} instead of {keys.short_context:,} tokens of context."
    )
    if count < _FEW:
        warn(f"{count} key tokens give wide intervals. Use more documents or longer lengths.")
    return documents
