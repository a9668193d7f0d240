"""Perplexity by a named protocol (see protocols.py). A sample is a document at one length, or at all of them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import tee, zip_longest
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


@dataclass
class Tally:
    """Sums over the scored tokens of one document at one length. Holds only numbers, so that it can be saved as JSON.

    nll: nats. bytes: of the scored text; None if unknown. class_nll, class_tokens: losses and tokens by the codes of
    CLASSES; empty if there are none.
    """

    nll: float = 0.0
    tokens: int = 0
    bytes: int | None = 0
    class_nll: list[float] = field(default_factory=list)
    class_tokens: list[int] = field(default_factory=list)

    def add(self, nll: np.ndarray, scored_bytes: int | None, classes: np.ndarray | None = None) -> None:
        """Add one window. nll: nats. nll, classes: shape (targets,)."""
        if not len(nll):
            return
        self.nll += float(nll.sum())
        self.tokens += len(nll)
        self.bytes = None if self.bytes is None or scored_bytes is None else self.bytes + scored_bytes
        if classes is not None:
            self.class_nll = _sums([self.class_nll, np.bincount(classes, nll, COUNT).tolist()])
            self.class_tokens = _sums([self.class_tokens, np.bincount(classes, minlength=COUNT).tolist()])


def _sums(lists: Iterable[list]) -> list:
    return [sum(values) for values in zip_longest(*lists, fillvalue=0)]


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
        self._whole = self.protocol.reads_whole_documents

    def up_to(self, length: int) -> "Perplexity":
        """The same target tokens at the lengths up to `length`; without one, `tail` is read at `length` itself.

        Protocols that do not score the same tokens at every length keep all lengths, and so does `sliding` without one.
        """
        lengths = [shorter for shorter in self.lengths if shorter <= length] if self.name in SAME_TOKENS else []
        if (
            not lengths
            and self.protocol.targets
            and self.protocol.targets + self.documents.special.first_scored <= length
        ):
            lengths = [length]
        return self if lengths in ([], self.lengths) else self.only(*lengths)

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
        chosen = {"stride": self.protocol.stride, "targets": self.protocol.targets, "end": self._end}
        chosen["reference"] = self.reference_length
        data = {"documents": len(self.documents.kept), "data": self._digest}
        return {"protocol": self.name, "lengths": self.lengths, **chosen, **data}

    def longest(self) -> tuple[np.ndarray, int, int]:
        cut = None if self._whole else self._end
        largest = max(int(document.ids[:cut].max(initial=0)) for document in self.documents.kept)
        longest = max(self.documents.kept, key=lambda document: len(document.ids))
        return longest.ids[: self.lengths[-1]], self.lengths[-1], largest

    def samples(self, *, one_pass: bool) -> list[SampleId]:
        lengths: Sequence[Any] = (_ALL,) if one_pass and self.name == "prefix" else self.lengths
        return [(length, index) for length in lengths for index in range(len(self.documents.kept))]

    def tokens(self, sample: SampleId) -> int:
        return sum(window.read for window in self._windows(sample) if window.targets)

    def pass_length(self, sample: SampleId) -> int:
        return self.lengths[-1] if sample[0] == _ALL else int(sample[0])

    def _windows(self, sample: SampleId) -> Iterator[Window]:
        length, index = sample
        length = self.lengths[-1] if length == _ALL else length
        return self.protocol.windows(self.documents.kept[index], self.documents.special, length, self._end)

    def score(self, reader: Reader, batch: Sequence[SampleId]) -> list[Any]:
        """Tallies by length of each document."""
        lengths = self.lengths if batch[0][0] == _ALL else [batch[0][0]]
        documents = [self.documents.kept[index] for _, index in batch]
        tallies = [{length: Tally() for length in lengths} for _ in documents]
        windows, read = tee(
            (index, window) for index, sample in enumerate(batch) for window in self._windows(sample) if window.targets
        )
        losses = reader.losses(window for _, window in read)
        for (index, window), nll in zip(windows, losses, strict=True):
            _enter(tallies[index], window, nll, documents[index], self._classes_of(batch[index][1]))
        return [{str(length): asdict(tally) for length, tally in by_length.items()} for by_length in tallies]

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
            ids = self.documents.special.ended(document.ids) if self._whole else document.ids[: self._end]
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
            tallies = [Tally(**value[str(length)]) for value in values.values() if str(length) in value]
            cells.append(_cell(self.name, length, tallies, self.documents.names))
        return cells

    @cached_property
    def _digest(self) -> str:
        """sha256 of all tokens; every scaling of a comparison needs it."""
        return self.documents.fingerprint()

    def identities(self) -> list[str]:
        return [digest(document.ids) for document in self.documents.kept]

    def fingerprint(self, values: Values) -> str:
        return self._digest


def _enter(
    tallies: dict[int, Tally], window: Window, nll: np.ndarray, document: Document, classes: np.ndarray | None
) -> None:
    """Add one window's losses to its document's tallies; a window may serve several lengths."""
    first = len(window.ids) - window.targets
    for length, tally in tallies.items():
        # a window that serves several lengths begins at the document's beginning
        scored = nll if len(tallies) == 1 else nll[: length - first]
        stop = window.stop if len(tallies) == 1 else length
        of_scored = None if classes is None else classes[stop - len(scored) : stop]
        tally.add(scored, document.bytes_of(stop - len(scored), stop), of_scored)


def _cell(protocol: str, length: int, tallies: Sequence[Tally], names: Sequence[str]) -> Cell:
    sums = np.array([tally.nll for tally in tallies])
    weights = np.array([tally.tokens for tally in tallies], dtype=np.float64)
    if not weights.sum():
        raise DataError(f"No tokens to score at length {length}: the documents are too short.")
    refuse_overflow(sums, weights, length, names)
    low, high = bootstrap_interval(sums, weights)
    text = [tally.bytes for tally in tallies if tally.bytes is not None]
    known = len(text) == len(tallies) and sum(text) > 0
    return Cell(
        protocol,
        length,
        tuple(sums.tolist()),
        tuple(weights.tolist()),
        low and max(low, 1.0),  # no loss is below zero
        high,
        tokens=int(weights.sum()),
        bits_per_byte=float(sums.sum()) / math.log(2) / sum(text) if known else None,
        by_class=_by_class(length, tallies),
    )


def _by_class(length: int, tallies: Sequence[Tally]) -> tuple[Cell, ...]:
    """The cells of the classes that have tokens."""
    cells = []
    for name, numbers in CLASSES.items() if all(tally.class_tokens for tally in tallies) else ():
        sums = [sum(tally.class_nll[number] for number in numbers) for tally in tallies]
        tokens = [sum(tally.class_tokens[number] for number in numbers) for tally in tallies]
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
