"""Training sequences of one source: the layout of its documents, and sequences assembled on demand.

long: each document is cut into full sequences; the rest of it is skipped.
concat: documents are concatenated in a random order and cut into sequences, also across documents.
packed: documents longer than a sequence are cut into full sequences; the rests are packed whole, longest first, each
into the sequence with the least room that fits (best-fit decreasing: Ding et al. 2024, arXiv:2404.10830, section 3).
Remaining room is padded.
single: one document per sequence, padded.

A conversation is never cut within a turn. One that is longer than a sequence is dropped, or cut at the start of turns.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ropecli.data.sampling import Selection
from ropecli.data.token_store import TokenStore

UNSCORED = -100
"""Label of a token whose next token is not scored."""
SHORTEST = 2
"""Minimum tokens of a packed piece: a single token has nothing to predict."""


@dataclass(frozen=True)
class SequenceLayout:
    """Sequence k has the pieces first[k] ≤ p < first[k + 1]; piece p is tokens start[p] ≤ t < stop[p] of document[p].

    All int64.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.first) - 1

    def pieces(self, sequence: int) -> list[tuple[int, int, int]]:
        """(document, start, stop) of each piece, in order."""
        part = slice(self.first[sequence], self.first[sequence + 1])
        columns = (self.document[part].tolist(), self.start[part].tolist(), self.stop[part].tolist())
        return list(zip(*columns, strict=True))

    def only(self, kept: np.ndarray) -> "SequenceLayout":
        """The sequences at which `kept`, shape (sequences,), bool, is true."""
        counts = np.diff(self.first)
        pieces = np.repeat(kept, counts)
        first = np.concatenate([[0], np.cumsum(counts[kept])])
        return SequenceLayout(self.document[pieces], self.start[pieces], self.stop[pieces], first)


def cut_long(lengths: np.ndarray, length: int) -> SequenceLayout:
    """lengths: of the documents, tokens. length: of a sequence, tokens."""
    document, start = _whole_sequences(lengths, length)
    return SequenceLayout(document, start, start + length, np.arange(len(document) + 1))


def concatenate(lengths: np.ndarray, length: int, draw: np.random.Generator) -> SequenceLayout:
    """Tokens after the last full sequence are dropped."""
    order = draw.permutation(len(lengths))
    sizes = lengths[order]
    starts = np.cumsum(sizes) - sizes
    end = int(sizes.sum()) // length * length
    borders = np.arange(0, end + 1, length)
    points = np.union1d(starts[starts < end], borders)
    at = np.searchsorted(starts, points[:-1], side="right") - 1
    start = points[:-1] - starts[at]
    return SequenceLayout(order[at], start, start + np.diff(points), np.searchsorted(points, borders))


def pieces_of(store: TokenStore, selection: Selection, length: int, *, cut: bool) -> SequenceLayout:
    """A sequence for each piece of a document that is read whole: texts are cut where a sequence is full.

    cut: whether conversations longer than a sequence are cut at the start of turns, instead of dropped. Rests of texts
    that are shorter than SHORTEST are dropped.
    """
    is_text = store.turn_counts[selection.documents] == 0
    texts = np.where(is_text, selection.lengths, 0)
    document, start = _whole_sequences(texts, length)
    rests = texts % length
    with_rest = np.flatnonzero(rests >= SHORTEST)
    pieces = [np.stack([document, start, start + length])]
    pieces.append(np.stack([with_rest, texts[with_rest] - rests[with_rest], texts[with_rest]]))
    for index in np.flatnonzero(~is_text).tolist():
        tokens, conversation = int(selection.lengths[index]), int(selection.documents[index])
        if tokens == store.lengths[conversation] <= length:
            pieces.append(np.array([[index], [0], [tokens]]))
        elif cut:
            turns, ends = store.turns_of(conversation).tolist(), store.turn_ends(conversation).tolist()
            ends = [end for end in ends if end <= tokens]
            pieces.append(_turns_within(index, turns, ends, length))
    document, start, stop = np.concatenate(pieces, axis=1).astype(np.int64)
    return SequenceLayout(document, start, stop, np.arange(len(document) + 1))


def _turns_within(index: int, turns: list[int], ends: list[int], length: int) -> np.ndarray:
    """(document, start, stop) of pieces of whole turns, as long as a sequence allows, shape (3, pieces)."""
    pieces: list[list[int]] = []
    for start, end in zip(turns, ends, strict=False):
        if pieces and pieces[-1][2] >= start and end - pieces[-1][1] <= length:
            pieces[-1][2] = end
        elif end - start <= length:
            pieces.append([index, start, end])
    return np.array(pieces, dtype=np.int64).reshape(-1, 3).T


def pack(pieces: SequenceLayout, length: int) -> SequenceLayout:
    """Pack pieces, of a sequence each, into sequences of `length` tokens."""
    sizes = pieces.stop - pieces.start
    order = np.argsort(-sizes, kind="stable")
    full = int((sizes == length).sum())
    sequence = np.concatenate([np.arange(full), full + _best_fit(sizes[order[full:]], length)])
    by_sequence = order[np.argsort(sequence, kind="stable")]
    first = np.searchsorted(np.sort(sequence), np.arange(sequence.max(initial=-1) + 2))
    return SequenceLayout(pieces.document[by_sequence], pieces.start[by_sequence], pieces.stop[by_sequence], first)


def _whole_sequences(lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(document, start) of every full sequence inside a document."""
    counts = lengths // length
    document = np.repeat(np.arange(len(lengths)), counts)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * length
    return document, start


def _best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Index of the sequence for each piece. sizes: of the pieces, descending."""
    sequences, made = np.empty(len(sizes), dtype=np.int64), 0
    with_room: dict[int, list[int]] = defaultdict(list)  # sequences by free room
    rooms: list[int] = []  # the distinct free rooms, ascending
    for index, size in enumerate(sizes.tolist()):
        at = bisect_left(rooms, size)
        if at == len(rooms):
            room, sequence, made = length, made, made + 1
        else:
            room = rooms[at]
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(at)
        room -= size
        if room >= SHORTEST:
            if not with_room[room]:
                insort(rooms, room)
            with_room[room].append(sequence)
        sequences[index] = sequence
    return sequences


@dataclass(frozen=True)
class TrainingSequence:
    """ids, labels, positions, document_labels: shape (length,), int64; see Batch. padding: tokens at the end."""

    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    document_labels: np.ndarray | None = None
    padding: int = 0


class SourceSequences:
    """The sequences of one source, reshuffled every epoch. number: index of the source in the mixture.

    padding: token that pads `packed` and `single` sequences. packed: positions restart at each document. by_document:
    add document_labels, which weight the loss. Sequences without a token to train on are dropped. targets: shape
    (sequences,), int64, scored labels of each; None if all tokens are trained on. answers: number of answers to train
    on; lost_answers: in no sequence. dropped: number of dropped sequences. document_lengths: tokens of each selected
    document, used or not.
    """

    def __init__(
        self,
        store: TokenStore,
        selection: Selection,
        layout: SequenceLayout,
        length: int,
        *,
        padding: int = 0,
        packed: bool = False,
        seed: int = 0,
        number: int = 0,
        by_document: bool = False,
    ) -> None:
        self.selection, self.layout, self.length = selection, layout, length
        self.document_lengths = store.lengths[selection.documents]
        self.largest_id = store.largest_id
        self._store, self._padding, self._packed = store, padding, packed
        # the first source has the same order as in a recipe with a single source
        self._seeds = (seed, number) if number else (seed,)
        self.targets: np.ndarray | None = None
        self.dropped = self.answers = self.lost_answers = 0
        self._labels: np.ndarray | None = None
        if store.masked or by_document:
            targets, labels = self._count_scored()
            self._labels = labels if by_document else None
        if store.masked:
            self.layout, self.targets = layout.only(targets > 0), targets[targets > 0]
            self.dropped = len(layout) - len(self.layout)
            self.lost_answers = self._count_answers() - self.answers

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
        if self._store.masked or stop - start < self.length:
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
        ids, positions = np.full(self.length, self._padding), np.arange(self.length)
        trained = np.zeros(self.length, dtype=bool)
        end = 0
        for document, start, stop in self.layout.pieces(sequence):
            begin, end = end, end + stop - start
            ids[begin:end], trained[begin:end] = self._store.read(int(self.selection.documents[document]), start, stop)
            if self._packed:
                trained[begin] = False  # nothing predicts the first token of a document
                positions[begin:end] = np.arange(end - begin)
        if self._packed:
            positions[end:] = np.arange(self.length - end)  # padding counts as a separate document
        labels = np.append(np.where(trained, ids, UNSCORED)[1:], UNSCORED)
        return TrainingSequence(ids, labels, positions, self._document_labels(sequence), self.length - end)

    def _count_scored(self) -> tuple[np.ndarray, np.ndarray]:
        """(labels to train on of each sequence, of each selected document in all of its pieces), int64."""
        targets = np.zeros(len(self.layout), dtype=np.int64)
        labels = np.zeros(len(self.selection.documents), dtype=np.int64)
        for sequence in range(len(self.layout)):
            scored = self.row(sequence).labels != UNSCORED
            targets[sequence] = scored.sum()
            self.answers += _runs(scored)
            np.add.at(labels, self._documents(sequence)[scored], 1)
        return targets, np.maximum(labels, 1)

    def _count_answers(self) -> int:
        """Answers of all selected documents."""
        sizes = zip(self.selection.documents.tolist(), self.document_lengths.tolist(), strict=True)
        return sum(_runs(self._store.read(document, 0, size)[1]) for document, size in sizes)

    def far_labels(self, pretraining_length: int) -> tuple[int, int]:
        """(labels with more than the pretraining length of context, all labels) of the sequences."""
        if self.targets is not None:
            rows = map(self.row, range(len(self)))
            scored = [row.positions[row.labels != UNSCORED] for row in rows]
            return sum(int((positions >= pretraining_length).sum()) for positions in scored), int(self.targets.sum())
        sizes = self.layout.stop - self.layout.start
        sizes = sizes if self._packed else np.add.reduceat(sizes, self.layout.first[:-1])
        return int(np.maximum(sizes - 1 - pretraining_length, 0).sum()), int((sizes - 1).sum())

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


def _runs(trained: np.ndarray) -> int:
    """Number of runs of true values."""
    return int((np.diff(trained.astype(np.int8), prepend=0) == 1).sum())


@lru_cache(maxsize=32)
def _order(seeds: tuple[int, ...], epoch: int, size: int) -> np.ndarray:
    seed, *number = seeds
    return np.random.default_rng([seed, epoch, *number]).permutation(size)
