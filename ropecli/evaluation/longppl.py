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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Interval, Len

from ropecli.checkpoint.files import read_bounded
from ropecli.data.documents import Document, Documents
from ropecli.errors import DataError, first_fault
from ropecli.evaluation.eval_report import write_report
from ropecli.evaluation.perplexity import window_losses
from ropecli.evaluation.protocols import ShortContext, Window
from ropecli.evaluation.results import Count, TokenCount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_GAIN = 2.0
MAX_LOSS = 2.0
_LARGEST = 2**28
"""Bytes of a file of key tokens."""

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
        others = ("documents", "kind", "schema_version", "checksum")
        return {key: value for key, value in asdict(self).items() if key not in others}

    def computed_checksum(self) -> str:
        return fingerprint(json.dumps(asdict(replace(self, checksum=None))))

    def select(self, texts: Texts) -> Iterator[tuple[str, str]]:
        """The texts that have keys, cut to what the evaluator read. Raises DataError for a text that is another."""
        left = {one.name: one for one in self.documents}
        for name, text in texts:
            if (one := left.pop(name, None)) is None:
                continue
            if fingerprint(text) != one.sha256:
                raise DataError(f"The key tokens were found in another text of {name}. Find them again.")
            yield name, text[: one.characters]
            if not left:
                return
        raise DataError(f"The key tokens were found in other data: {next(iter(left))} is not in --data.")

    def mark(self, documents: Documents) -> tuple[Documents, int]:
        """Fill in Document.keys of documents that were read from `select` with spans. Also returns how many."""
        intervals = {one.name: one.intervals for one in self.documents}
        first, marked, count = documents.special.first_scored, [], 0
        for document in documents.kept:
            keys = positions_within(_spans_of(document), intervals[document.name], first)
            marked.append(replace(document, spans=None, keys=keys))
            count += len(keys)
        return replace(documents, kept=tuple(marked)), count


def find_keys(
    model: "PreTrainedModel",
    documents: Documents,
    hashes: Mapping[str, str],
    length: int,
    context: ShortContext,
    **options: Any,
) -> tuple[KeyDocument, ...]:
    """The key tokens of each document, as found by the evaluator `model`.

    documents: with spans. hashes: fingerprints of the whole texts, by name. Other arguments: see key_positions.
    """
    positions = key_positions(model, documents, length, context, **options)
    found = []
    for document, keys in zip(documents.kept, positions, strict=True):
        spans = _spans_of(document)
        found.append(KeyDocument(document.name, hashes[document.name], int(spans.max()), _merged(spans[keys])))
    return tuple(found)


def key_positions(
    model: "PreTrainedModel", documents: Documents, length: int, context: ShortContext, **options: Any
) -> list[np.ndarray]:
    """Positions of the key tokens of each document, as found by the evaluator `model`: shape (keys,), int64, each.

    Each document has `length` tokens. options: those of window_losses.
    """

    def windows(document: Document) -> Iterator[Window]:
        yield Window(document.ids, len(document.ids) - 1, len(document.ids))
        for start, stop in context.windows(len(document.ids)):
            yield Window(document.ids[start:stop], stop - start - context.tokens, stop)

    losses = window_losses(model, documents, length, windows, **options)
    found = []
    for index in range(len(documents.kept)):
        long, short = losses[index][0][context.first - 1 :], np.concatenate(losses[index][1:])
        is_key = (short - long > MIN_GAIN) & (long < MAX_LOSS)
        found.append(context.first + np.flatnonzero(is_key))
    return found


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
    """Write the file of key tokens atomically. Raises OutputError."""
    write_report(path, asdict(replace(keys, checksum=keys.computed_checksum())))


def read_keys(path: Path) -> Keys:
    """Read a file that write_keys wrote. Raises DataError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        keys = TypeAdapter(Keys).validate_python(json.loads(read_bounded(path, _LARGEST)))
    except ValidationError as error:
        raise DataError(f"{path} is not a file of key tokens, {first_fault(error)}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as a file of key tokens: {error}.") from error
    for document in keys.documents:
        borders = [0, *(border for interval in document.intervals for border in interval), document.characters]
        if borders != sorted(borders):
            raise DataError(f"{path} is damaged: the intervals of {document.name} overlap or are reversed.")
    if keys.checksum not in (None, keys.computed_checksum()):
        raise DataError(f"{path} is damaged: it does not match its checksum. Find the key tokens again.")
    return keys
