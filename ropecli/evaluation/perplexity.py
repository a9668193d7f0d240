"""Perplexity at several lengths by a named protocol (see protocols.py)."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from ropecli.data.documents import Document, Documents
from ropecli.errors import DataError
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.protocols import YARN_STRIDE, Protocol, Window
from ropecli.evaluation.results import LengthResult, Tally, summarise
from ropecli.evaluation.saved_progress import EvalProgress, Tallies
from ropecli.evaluation.scoring import TokenScorer, one_pass_message, refuse_unknown_ids, within_memory
from ropecli.live.devices import input_device, peak_memory, reset_peak
from ropecli.live.rotary import reset_tables, rotary_tables, switches_with_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def evaluate_perplexity(
    model: "PreTrainedModel",
    documents: Documents,
    lengths: Sequence[int],
    *,
    protocol: str | Protocol = "prefix",
    switching: bool = False,
    chunk: int | None = None,
    batch_size: int = 1,
    progress: EvalProgress | None = None,
    part: str = "",
    workers: Workers | None = None,
    advance: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda message: None,
) -> list[LengthResult]:
    """Measure perplexity at each length. `prefix` and `tail` require max(lengths) tokens of each document.

    switching: whether a patch in memory makes the frequencies depend on the length, so that each length requires its
    own pass; the model's own tables are always checked. chunk: tokens per forward pass, with earlier ones in the KV
    cache; None for all. batch_size: windows per pass. progress, part: where scored documents are saved; saved documents
    are not scored again. workers: the processes that share the documents. advance: called after each pass over a
    document, see `count_passes`. say: called with warnings.

    Raises DataError for documents or settings that do not fit, RopecliError for a loss that is not finite.
    """
    lengths = sorted(set(lengths))
    protocol = Protocol(protocol) if isinstance(protocol, str) else protocol
    protocol = protocol.settled(lengths, documents.special)
    if batch_size < 1 or (chunk is not None and chunk < 1):
        raise DataError(f"batch_size is {batch_size} and chunk {chunk}; each must be at least 1.")
    _check_documents(model, documents, lengths[-1], protocol)
    if protocol.name == "yarn" and lengths[0] <= YARN_STRIDE:
        say(f"At {lengths[0]} tokens the protocol yarn skips tokens between windows, as YaRN's script does.")
    progress = EvalProgress() if progress is None else progress
    meter = _Meter(model, documents, lengths, protocol, switching, batch_size)
    workers = workers or Workers()
    own = workers.share(range(len(documents.kept)))
    done = {index: tallies for index, tallies in progress.of(part).items() if sorted(tallies) == lengths}
    todo = [index for index in own if index not in done]
    for _ in range(count_passes(lengths, len(own) - len(todo), protocol, meter.switching)):
        advance()
    if chunk is not None and todo:
        meter.read_by_chunks(chunk, say)
    for start in range(0, len(todo), batch_size):
        batch = todo[start : start + batch_size]
        for index, tallies in zip(batch, meter.measure(batch, advance), strict=True):
            progress.add(part, index, tallies)
    done = progress.of(part)
    measured = workers.gather({index: done[index] for index in own})
    names = [document.name for document in documents.kept]
    by_document = [measured[index] for index in range(len(names))]
    by_windows = protocol.name == "yarn"
    return [
        summarise(length, [tallies[length] for tallies in by_document], names, by_windows=by_windows)
        for length in lengths
    ]


def count_passes(lengths: Sequence[int], documents: int, protocol: Protocol, switching: bool) -> int:
    """Return how many times `advance` is called."""
    return documents * (1 if protocol.name == "prefix" and not switching else len(set(lengths)))


def window_losses(
    model: "PreTrainedModel",
    documents: Documents,
    length: int,
    windows_of: Callable[[Document], Iterable[Window]],
    *,
    chunk: int | None = None,
    batch_size: int = 1,
    workers: Workers | None = None,
    advance: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda message: None,
) -> dict[int, list[np.ndarray]]:
    """Losses of each document's windows, by document: shape (targets,) each, nats, float64.

    length: tokens of the longest window; each document has as many. advance: called after each document. Other
    arguments as in evaluate_perplexity.
    """
    protocol = Protocol("prefix")
    _check_documents(model, documents, length, protocol)
    meter = _Meter(model, documents, [length], protocol, switching=False, batch_size=batch_size)
    if chunk is not None:
        meter.read_by_chunks(chunk, say)
    workers, found = workers or Workers(), {}
    for index in workers.share(range(len(documents.kept))):
        windows = ((index, window) for window in windows_of(documents.kept[index]))
        groups = _alike(windows, batch_size)
        found[index] = [nll for group in groups for nll in meter._score([window for _, window in group])]
        advance()
    return workers.gather(found)


class _Meter:
    """Measures documents with one model and one set of settings."""

    def __init__(
        self,
        model: "PreTrainedModel",
        documents: Documents,
        lengths: list[int],
        protocol: Protocol,
        switching: bool,
        batch_size: int,
    ) -> None:
        self.documents = documents
        self.lengths = lengths
        self.protocol = protocol
        self.batch_size = batch_size
        self.device = input_device(model)
        self.score = TokenScorer(model)
        tables = rotary_tables(model)
        self.dynamic_tables = tables if switches_with_length(tables, lengths[-1]) else []
        self.switching = switching or bool(self.dynamic_tables)
        self.one_pass = protocol.name == "prefix" and not self.switching

    def read_by_chunks(self, chunk: int, say: Callable[[str], None]) -> None:
        """Read in chunks from now on if that gives the same losses on the longest document."""
        longest = max(self.documents.kept, key=lambda document: len(document.ids))
        ids = torch.from_numpy(longest.ids[: self.lengths[-1]])[None].to(self.device)
        if ids.shape[1] <= chunk:
            return
        if not self.switching:
            self.score.chunk = chunk
            if self.score.reads_by_chunks_as_at_once(ids):
                return
            self.score.chunk = None
        say(one_pass_message(chunk, switching=self.switching))

    def measure(self, batch: list[int], advance: Callable[[], None]) -> list[Tallies]:
        """Measure a batch of documents. Returns tallies by length for each."""
        documents = [self.documents.kept[index] for index in batch]
        tallies: list[Tallies] = [{} for _ in batch]
        for length in self.lengths[-1:] if self.one_pass else self.lengths:
            for own, one in zip(tallies, self._pass(documents, length), strict=True):
                own.update(one)
            for _ in batch:
                advance()
        return tallies

    def _pass(self, documents: list[Document], length: int) -> list[Tallies]:
        """Read documents at one length. Returns tallies of that length, or of all lengths if one pass serves all."""
        served = self.lengths if self.one_pass else [length]
        tallies = [{one: Tally() for one in served} for _ in documents]
        reset_peak(self.device)
        begun = time.perf_counter()
        windows = (
            (index, window)
            for index, document in enumerate(documents)
            for window in self.protocol.windows(document, self.documents.special, length, self.lengths[-1])
            if window.targets
        )
        for group in _alike(windows, self.batch_size):
            for (index, window), nll in zip(group, self._score([window for _, window in group]), strict=True):
                _enter(tallies[index], window, nll, documents[index])
        seconds, peak = (time.perf_counter() - begun) / len(documents), peak_memory(self.device)
        for own in tallies:
            for tally in own.values():
                tally.seconds, tally.peak_memory = seconds, peak
        return tallies

    def _score(self, windows: list[Window]) -> Iterator[np.ndarray]:
        """Losses of the targets of windows of equal shape, nats, float64."""
        reset_tables(self.dynamic_tables)
        ids = torch.from_numpy(np.stack([window.ids for window in windows])).to(self.device)
        targets = max(window.targets for window in windows)
        with within_memory(*ids.shape):
            losses = self.score(ids, targets, windows[0].reads_last).cpu().double().numpy()
        for window, nll in zip(windows, losses, strict=True):
            yield nll[targets - window.targets :]


def _enter(tallies: Tallies, window: Window, nll: np.ndarray, document: Document) -> None:
    """Add one window's losses to its document's tallies; a window may serve several lengths."""
    first = len(window.ids) - window.targets
    if window.picked is not None:
        [tally] = tallies.values()
        text = document.bytes_at(window.stop - window.targets + window.picked)
        tally.add(nll[window.picked], first + window.picked, text)
        tally.read += window.read
        return
    for length, tally in tallies.items():
        # a window that serves several lengths begins at the document's beginning
        own = nll if len(tallies) == 1 else nll[: length - first]
        stop = window.stop if len(tallies) == 1 else length
        tally.add(own, first + np.arange(len(own)), document.bytes_of(stop - len(own), stop))
        tally.read += window.read


def _alike(windows: Iterable[tuple[int, Window]], size: int) -> Iterator[list[tuple[int, Window]]]:
    """Batches of up to `size` windows with equal numbers of tokens."""
    for _, same in groupby(windows, key=lambda pair: (len(pair[1].ids), pair[1].read)):
        while batch := list(islice(same, size)):
            yield batch


def _check_documents(model: "PreTrainedModel", documents: Documents, longest: int, protocol: Protocol) -> None:
    shortest = min(len(document.ids) for document in documents.kept)
    whole = protocol.reads_whole_documents or protocol.name == "longppl"
    if shortest < longest and not whole:
        raise DataError(f"A document has {shortest} tokens, but the longest length is {longest}.")
    cut = None if whole else longest
    largest = max(int(document.ids[:cut].max(initial=0)) for document in documents.kept)
    if (inserted := protocol.inserted(documents.special)) is not None:
        largest = max(largest, inserted)
    refuse_unknown_ids(largest, model)
