"""Lays out documents in sequences of one length, using only the documents' lengths.

long: each document is cut into full sequences; the rest of it is skipped.
concat: documents are concatenated in a random order and cut into sequences, also across documents.
packed: documents longer than a sequence are cut into full sequences; the rests are packed whole, longest first, each
into the sequence with the least room that fits (best-fit decreasing: Ding et al. 2024, arXiv:2404.10830, section 3).
Remaining room is padded.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

SHORTEST = 2
"""Minimum tokens of a packed piece: a single token has nothing to predict."""


@dataclass(frozen=True)
class SequenceLayout:
    """Sequence k has the pieces first[k] ≤ p < first[k + 1]; piece p is tokens start[p] ≤ t < stop[p] of document[p].

    All int64. A stop of the document's length plus one includes the separator token after it.
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


def concatenate(lengths: np.ndarray, length: int, draw: np.random.Generator, *, separated: bool) -> SequenceLayout:
    """separated: a separator follows each document. Tokens after the last full sequence are dropped."""
    order = draw.permutation(len(lengths))
    sizes = lengths[order] + separated
    starts = np.cumsum(sizes) - sizes
    end = int(sizes.sum()) // length * length
    borders = np.arange(0, end + 1, length)
    points = np.union1d(starts[starts < end], borders)
    at = np.searchsorted(starts, points[:-1], side="right") - 1
    start = points[:-1] - starts[at]
    return SequenceLayout(order[at], start, start + np.diff(points), np.searchsorted(points, borders))


def pack(lengths: np.ndarray, length: int) -> SequenceLayout:
    """Drops rests of documents that are shorter than SHORTEST."""
    document, start = _whole_sequences(lengths, length)
    rests = lengths % length
    packed = np.flatnonzero(rests >= SHORTEST)
    packed = packed[np.argsort(-rests[packed], kind="stable")]
    sequence = np.concatenate([np.arange(len(document)), len(document) + _best_fit(rests[packed], length)])
    document = np.concatenate([document, packed])
    start = np.concatenate([start, lengths[packed] - rests[packed]])
    stop = np.minimum(start + length, lengths[document])
    by_sequence = np.argsort(sequence, kind="stable")
    first = np.searchsorted(sequence[by_sequence], np.arange(sequence.max(initial=-1) + 2))
    return SequenceLayout(document[by_sequence], start[by_sequence], stop[by_sequence], first)


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
