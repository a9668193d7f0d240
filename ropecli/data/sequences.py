"""Training sequences of one source, assembled on demand, and a summary of how its documents are used."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ropecli.data.sampling import Selection
from ropecli.data.sequence_layouts import SequenceLayout
from ropecli.data.token_store import TokenStore

UNSCORED = -100
"""Label of a token whose next token is not scored."""


@dataclass(frozen=True)
class TrainingSequence:
    """ids, labels, positions, document_labels: shape (length,), int64; see Batch."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_labels: np.ndarray | None = None


class SourceSequences:
    """The sequences of one source, reshuffled every epoch. number: index of the source in the mixture.

    separator: token between documents of `concat`, None for none. padding: token that pads packed sequences; None for
    other layouts. by_document: add document_labels, which weight the loss. Sequences without a token to train on are
    dropped. targets: shape (sequences,), int64, scored labels of each; None if all tokens are trained on. dropped:
    number of dropped sequences. document_lengths: tokens of each selected document, used or not.
    """

    def __init__(
        self,
        store: TokenStore,
        selection: Selection,
        layout: SequenceLayout,
        length: int,
        *,
        separator: int | None = None,
        padding: int | None = None,
        seed: int = 0,
        number: int = 0,
        by_document: bool = False,
    ) -> None:
        self.selection, self.layout, self.length = selection, layout, length
        self.document_lengths = store.lengths[selection.documents]
        self.largest_id = store.largest_id
        self._store, self._padding, self._separator = store, padding, separator
        # the first source has the same order as in a recipe with a single source
        self._seeds = (seed, number) if number else (seed,)
        self.targets: np.ndarray | None = None
        self.dropped = 0
        self._labels: np.ndarray | None = None
        if store.masked:
            targets, labels = self._count_scored()
            self.layout, self.targets = layout.only(targets > 0), targets[targets > 0]
            self.dropped = len(layout) - len(self.layout)
            self._labels = labels if by_document else None
        elif by_document:
            self._labels = self._count_labels()

    def __len__(self) -> int:
        return len(self.layout)

    def at(self, position: int) -> TrainingSequence:
        """The sequence at a position of this source's infinite stream."""
        return self.row(self._sequence(position))

    def skipping_at(self, position: int, positions: np.ndarray) -> TrainingSequence:
        """The sequence with other positions; its text skips ahead in the document by the same gaps, up to its end.

        positions: shape (length,), int64, strictly increasing from 0. A label is the next token of the document, also
        before a skip. A sequence of several documents does not skip, nor does one of a masked store: it could skip
        its answers.
        """
        sequence = self._sequence(position)
        document, start, stop = self.layout.pieces(sequence)[0]
        tokens = int(self.selection.lengths[document])
        # stop > tokens: a separator follows
        if self._store.masked or stop - start < self.length or stop > tokens:
            return replace(self.row(sequence), positions=positions)
        ahead = np.arange(self.length) + np.minimum(positions - np.arange(self.length), tokens - stop)
        end = min(tokens, start + int(ahead[-1]) + 2)
        text = np.append(self._store.read(int(self.selection.documents[document]), start, end)[0], UNSCORED)
        return TrainingSequence(text[ahead], text[ahead + 1], positions, self._document_labels(sequence))

    def _sequence(self, position: int) -> int:
        epoch, index = divmod(position, len(self))
        return int(_order(self._seeds, epoch, len(self))[index])

    def row(self, sequence: int) -> TrainingSequence:
        """Assemble a sequence. A label is the next token of the sequence; if packed, of the same document."""
        packed = self._padding is not None
        ids, positions = np.full(self.length, self._padding or 0), np.arange(self.length)
        trained = np.zeros(self.length, dtype=bool)
        end = 0
        for document, start, stop in self.layout.pieces(sequence):
            begin, end = end, end + stop - start
            tokens = int(self.selection.lengths[document])
            inside = slice(begin, begin + min(stop, tokens) - start)
            ids[inside], trained[inside] = self._store.read(
                int(self.selection.documents[document]), start, min(stop, tokens)
            )
            if stop > tokens:
                ids[end - 1], trained[end - 1] = self._separator, not self._store.masked
            if packed:
                trained[begin] = False  # nothing predicts the first token of a document
                positions[begin:end] = np.arange(end - begin)
        if packed:
            positions[end:] = np.arange(self.length - end)  # padding counts as a separate document
        labels = np.append(np.where(trained, ids, UNSCORED)[1:], UNSCORED)
        return TrainingSequence(ids, labels, positions, self._document_labels(sequence))

    def _count_labels(self) -> np.ndarray:
        """Labels of each selected document in all of its pieces, shape (documents,), int64."""
        labels = self.layout.stop - self.layout.start
        # nothing predicts the first token of a sequence, or of a packed piece
        labels[self.layout.first[:-1] if self._padding is None else slice(None)] -= 1
        counts = np.bincount(self.layout.document, weights=labels, minlength=len(self.selection.documents))
        return counts.astype(np.int64)

    def _count_scored(self) -> tuple[np.ndarray, np.ndarray]:
        """(labels to train on of each sequence, of each selected document in all of its pieces), int64."""
        targets = np.zeros(len(self.layout), dtype=np.int64)
        labels = np.zeros(len(self.selection.documents), dtype=np.int64)
        for sequence in range(len(self.layout)):
            scored = self.row(sequence).labels != UNSCORED
            targets[sequence] = scored.sum()
            np.add.at(labels, self._documents(sequence)[scored], 1)
        return targets, np.maximum(labels, 1)

    def _document_labels(self, sequence: int) -> np.ndarray | None:
        return None if self._labels is None else self._labels[self._documents(sequence)]

    def _documents(self, sequence: int) -> np.ndarray:
        """Document of each label, shape (length,), as an index in the selection. The last one's also for padding."""
        pieces = slice(self.layout.first[sequence], self.layout.first[sequence + 1])
        document = self.layout.document[pieces]
        of_token = np.repeat(document, self.layout.stop[pieces] - self.layout.start[pieces])
        labels = np.full(self.length, document[-1])
        labels[: len(of_token) - 1] = of_token[1:]  # a label is the next token
        return labels


@lru_cache(maxsize=32)
def _order(seeds: tuple[int, ...], epoch: int, size: int) -> np.ndarray:
    seed, *number = seeds
    return np.random.default_rng([seed, epoch, *number]).permutation(size)


def describe_source(name: str, part: SourceSequences, kind: str, share: float | None) -> str:
    """Summarize a source. share: its fraction of the stream; None if it is the only source."""
    selection, layout = part.selection, part.layout
    sizes = np.minimum(layout.stop, selection.lengths[layout.document]) - layout.start  # without separators
    pieces = np.bincount(layout.document[sizes > 0], minlength=len(selection.documents))
    of_document = np.bincount(layout.document, weights=sizes, minlength=len(selection.documents))
    is_cut = (pieces > 1) | (of_document < part.document_lengths)
    used, cut, tokens = int((pieces > 0).sum()), int((is_cut & (pieces > 0)).sum()), int(sizes.sum())
    documents = f"{used:,} of {selection.of:,} documents, {_share(used, selection.of)}"
    parts = [f"{name}: {len(part):,} sequences ({kind}) from {documents}"]
    if share is not None:
        parts.append(f"{share:.1%} of the stream")
    reasons = {
        "too short": selection.too_short,
        "skipped by keep_short": selection.not_drawn,
        "beyond max_tokens": selection.over_budget,
        "not in any sequence" if part.dropped else "left over at the end": len(selection.documents) - used,
    }
    parts += [f"{_share(count, selection.of)} of the documents are {why}" for why, count in reasons.items() if count]
    if cut:
        parts.append(f"{_share(cut, used)} of those used are cut")
    if left := int(selection.lengths.sum()) - tokens:
        parts.append(f"{_share(left, int(selection.lengths.sum()))} of their tokens are unused")
    if part.targets is not None:
        parts.append(f"{_share(int(part.targets.sum()), len(layout) * part.length)} of the tokens are trained on")
    if part.dropped:
        parts.append(f"{part.dropped:,} sequences without a token to train on are skipped")
    if padding := len(layout) * part.length - int((layout.stop - layout.start).sum()):
        parts.append(f"{_share(padding, len(layout) * part.length)} of the sequences is padding")
    return "; ".join(parts) + "."


def _share(part: int, whole: int) -> str:
    """Percentage; never 0.0% for a non-empty part."""
    return f"{part / whole:.1%}" if part / whole >= 0.0005 else "under 0.1%"
