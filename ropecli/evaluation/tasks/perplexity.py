"""Perplexity by a named protocol (see protocols.py). A sample is a document at one length, or at all of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import tee
from typing import Any

import numpy as np

from ropecli.data.documents import Document, Documents
from ropecli.errors import DataError, NotFiniteError
from ropecli.evaluation.copies import CLASSES, COUNT, classes_of
from ropecli.evaluation.driver import SampleId, Task, Values
from ropecli.evaluation.lengths import Lengths
from ropecli.evaluation.protocols import SAME_TOKENS, Protocol, Window
from ropecli.evaluation.readers.reader import Reader
from ropecli.evaluation.report import Cell
from ropecli.evaluation.statistics import LARGEST_NLL, bootstrap_interval
from ropecli.evaluation.subject import Subject
from ropecli.evaluation.texts import read_texts
from ropecli.hashing import digest
from ropecli.options import PerplexityOptions

_ALL = "all"
"""The length of samples that are read once for all lengths."""


class Perplexity(Task):
    """Raises DataError for settings that do not fit.

    lengths: tokens; `prefix` and `tail` require the longest of each document. source: for the report.
    pretraining_length: of the first subject; the loss is then split by what the text repeats (evaluation/copies.py).
    """

    documents: Documents
    answers = False

    def __init__(
        self,
        documents: Documents,
        lengths: Iterable[int],
        protocol: str | Protocol = "prefix",
        source: str = "",
        pretraining_length: int | None = None,
    ) -> None:
        self.documents, self.source = documents, source
        self.lengths = sorted(set(lengths))
        self._end = self.lengths[-1]  # of the documents
        within = [length for length in self.lengths if pretraining_length and length <= pretraining_length]
        self.reference_length = max(within, default=pretraining_length)
        self._classes: dict[int, np.ndarray] = {}
        protocol = Protocol(protocol) if isinstance(protocol, str) else protocol
        self.protocol = protocol.for_lengths(self.lengths, documents.special)
        self.name = self.protocol.name

    def up_to(self, length: int) -> "Perplexity":
        """The same target tokens at the lengths up to `length`; without one, `tail` is read at `length` itself.

        Protocols that do not score the same tokens at every length keep all lengths, and so does `sliding` without one.
        """
        lengths = [shorter for shorter in self.lengths if shorter <= length] if self.name in SAME_TOKENS else []
        least = (self.protocol.targets or math.inf) + self.documents.special.first_scored
        if not lengths and least <= length:
            lengths = [length]
        return self if lengths in ([], self.lengths) else self.only(*lengths)

    def of_first(self, count: int) -> "Perplexity":
        """The same on the first documents."""
        documents = replace(self.documents, kept=self.documents.kept[:count])
        return Perplexity(documents, self.lengths, self.protocol, self.source, self.reference_length)

    def only(self, *lengths: int) -> "Perplexity":
        """The same documents and target tokens at some of the lengths."""
        task = copy(self)
        task.lengths = list(lengths)
        return task

    @property
    def settings(self) -> dict[str, Any]:
        chosen = {"stride": self.protocol.stride, "targets": self.protocol.targets}
        return {**chosen, "reference_length": self.reference_length}

    def request(self) -> dict[str, Any]:
        data = {"end": self._end, "documents": len(self.documents.kept), "data": self.documents.fingerprint()}
        return {"protocol": self.name, "lengths": self.lengths, **self.settings, **data}

    def longest(self) -> tuple[np.ndarray, int, int]:
        cut = None if self.protocol.reads_whole_documents else self._end
        largest = max(int(document.ids[:cut].max(initial=0)) for document in self.documents.kept)
        longest = max(self.documents.kept, key=lambda document: len(document.ids))
        return longest.ids[: self.lengths[-1]], self.lengths[-1], largest

    def samples(self, *, one_pass: bool) -> list[SampleId]:
        lengths: Sequence[Any] = (_ALL,) if one_pass and self.name == "prefix" else self.lengths
        return [(length, index) for length in lengths for index in range(len(self.documents.kept))]

    def tokens(self, sample: SampleId) -> int:
        return sum(len(window.ids) for window in self._windows(sample) if window.targets)

    def pass_length(self, sample: SampleId) -> int:
        return self.lengths[-1] if sample[0] == _ALL else int(sample[0])

    def _windows(self, sample: SampleId) -> Iterator[Window]:
        length, index = sample
        length = self.lengths[-1] if length == _ALL else length
        return self.protocol.windows(self.documents.kept[index], self.documents.special, length, self._end)

    def score(self, reader: Reader, batch: Sequence[SampleId]) -> list[Any]:
        """The sums of each document by length."""
        scored: list[list[tuple[int, np.ndarray]]] = [[] for _ in batch]
        windows, read = tee(
            (place, window) for place, sample in enumerate(batch) for window in self._windows(sample) if window.targets
        )
        for (place, window), nll in zip(windows, reader.losses(window for _, window in read), strict=True):
            scored[place].append((window.stop, nll))
        values = []
        for (length, index), of_document in zip(batch, scored, strict=True):
            by_length = {length: of_document}
            if length == _ALL:
                [(stop, nll)] = of_document  # the only window begins at the document's beginning
                by_length = {shorter: [(shorter, nll[: len(nll) - (stop - shorter)])] for shorter in self.lengths}
            values.append({str(each): self._sums(index, windows) for each, windows in by_length.items()})
        return values

    def _sums(self, index: int, scored: Sequence[tuple[int, np.ndarray]]) -> dict[str, Any]:
        """Sums over the scored tokens of a document, as JSON; class_nll and class_tokens by the codes of CLASSES.

        scored: the position after the last token, and the losses, of each window.
        """
        document, classes = self.documents.kept[index], self._classes_of(index)
        spans = [(stop - len(nll), stop) for stop, nll in scored]
        text = [document.bytes_of(*span) for span in spans]
        sums: dict[str, Any] = {
            "nll": sum(float(nll.sum()) for _, nll in scored),
            "tokens": sum(len(nll) for _, nll in scored),
            "bytes": None if None in text else sum(text),
        }
        if classes is not None:
            codes = [classes[start:stop] for start, stop in spans]
            losses = [np.bincount(each, nll, COUNT) for each, (_, nll) in zip(codes, scored, strict=True)]
            sums["class_nll"] = np.sum(losses, axis=0).tolist()
            sums["class_tokens"] = np.sum([np.bincount(each, minlength=COUNT) for each in codes], axis=0).tolist()
        return sums

    def texts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids, whether each is scored) of the windows at the longest length; shape (tokens,) each."""
        windows = [
            window for index in range(len(self.documents.kept)) for window in self._windows((self.lengths[-1], index))
        ]
        return [(window.ids, window.scored) for window in windows]

    def _classes_of(self, index: int) -> np.ndarray | None:
        """The class of each token of a document: the same at every length."""
        if (reference := self.reference_length) is None:
            return None
        if index not in self._classes:
            document = self.documents.kept[index]
            whole = self.protocol.reads_whole_documents
            ids = self.documents.special.ended(document.ids) if whole else document.ids[: self._end]
            self._classes[index] = classes_of(ids, self._starts(document, len(ids)), reference)
        return self._classes[index]

    def _starts(self, document: Document, tokens: int) -> np.ndarray:
        """The first position that a reader of the longest length has before each token; shape (tokens,)."""
        starts, special = np.zeros(tokens, dtype=np.int64), self.documents.special
        for window in self.protocol.windows(document, special, self._end, self._end):
            first = window.stop - len(window.ids)
            starts[window.stop - window.targets : window.stop] = first + len(special.prefix) if first > 0 else 0
        return starts

    def cells(self, values: Values) -> list[Cell]:
        """Raises NotFiniteError for a loss that is not finite, DataError if there are no tokens."""
        cells = []
        for length in self.lengths:
            documents = [value[str(length)] for value in values.values() if str(length) in value]
            cells.append(_cell(self.name, length, documents, self.documents.names))
        return cells

    def identities(self) -> list[str]:
        return [digest(document.ids) for document in self.documents.kept]

    def fingerprint(self, values: Values) -> str:
        return self.documents.fingerprint()


def _cell(protocol: str, length: int, documents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Cell:
    """documents: the sums of each."""
    sums = np.array([document["nll"] for document in documents])
    weights = np.array([document["tokens"] for document in documents], dtype=np.float64)
    if not weights.sum():
        raise DataError(f"No tokens to score at length {length}: the documents are too short.")
    refuse_overflow(sums, weights, length, names)
    low, high = bootstrap_interval(sums, weights)
    text = [document["bytes"] for document in documents]
    known = None not in text and sum(text) > 0
    return Cell(
        protocol,
        length,
        tuple(sums.tolist()),
        tuple(weights.tolist()),
        low and max(low, 1.0),  # no loss is below zero
        high,
        tokens=int(weights.sum()),
        bits_per_byte=float(sums.sum()) / math.log(2) / sum(text) if known else None,
        by_class=_by_class(length, documents),
    )


def _by_class(length: int, documents: Sequence[Mapping[str, Any]]) -> tuple[Cell, ...]:
    """The cells of the classes that have tokens."""
    cells = []
    for name, codes in CLASSES.items() if "class_nll" in documents[0] else ():
        sums, tokens = (
            [sum(document[key][code] for code in codes) for document in documents]
            for key in ("class_nll", "class_tokens")
        )
        if sum(tokens):
            cells.append(Cell(name, length, tuple(sums), tuple(map(float, tokens)), tokens=sum(tokens)))
    return tuple(cells)


def refuse_overflow(sums: np.ndarray, weights: np.ndarray, length: int, names: Sequence[str]) -> None:
    """Raise NotFiniteError for a loss that is not finite or too large. sums, weights: of each document."""
    bad = np.flatnonzero(~(np.abs(sums) <= LARGEST_NLL * weights))
    if len(bad):
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise NotFiniteError(
            f"The loss is not finite, or above {LARGEST_NLL:g} nats, at length {length} in {names[bad[0]]}{more}: the "
            "model overflows. Try another --dtype."
        )


def make_perplexity(options: PerplexityOptions, tokenizer: Any, lengths: Lengths, subject: Subject) -> Perplexity:
    """The task on the documents that this tokenizer reads. subject: the first to read it. Raises DataError."""
    protocol = Protocol(options["protocol"], options["stride"], options["targets"])
    documents, chosen = read_texts(options, tokenizer, lengths, protocol)
    return Perplexity(documents, chosen, protocol, options["data"], subject.positions.pretraining_length)
