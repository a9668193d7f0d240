"""Lays out documents in sequences of one length, from the documents' lengths alone.

long: consecutive sequences from documents of at least a sequence; the rest of a document is skipped.
concat: documents in a seeded order one after the other, cut wherever a sequence is full, also across documents.
packed: documents longer than a sequence are cut into sequences; these and the rest are packed whole, each into the
sequence where the least room is left, longest first (best-fit decreasing: Ding et al. 2024, arXiv:2404.10830,
section 3). Room that nothing fits is padded.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

SHORTEST = 2
"""Tokens of a packed piece: a single one has nothing to predict."""


@dataclass(frozen=True)
class SequenceLayout:
    """Sequence k is the pieces first[k] ≤ p < first[k + 1]: of document[p] the tokens start[p] ≤ t < stop[p].

    All int64. A stop of one beyond the document's length stands for the token that separates it from the next.
    """

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        """Sequences."""
        return len(self.first) - 1

    def pieces(self, sequence: int) -> list[tuple[int, int, int]]:
        """(document, start, stop) of each piece of a sequence, in order."""
        part = slice(self.first[sequence], self.first[sequence + 1])
        columns = (self.document[part].tolist(), self.start[part].tolist(), self.stop[part].tolist())
        return list(zip(*columns, strict=True))


def cut_long(lengths: np.ndarray, length: int) -> SequenceLayout:
    """lengths: of the documents, tokens. length: of a sequence."""
    document, start = _whole_sequences(lengths, length)
    return SequenceLayout(document, start, start + length, np.arange(len(document) + 1))


def concatenate(lengths: np.ndarray, length: int, draw: np.random.Generator, *, separated: bool) -> SequenceLayout:
    """separated: one more token follows each document. The tokens after the last full sequence are left out."""
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
    """Rests of documents that are shorter than SHORTEST are left out."""
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
    """sizes: descending. The sequence that each is put into."""
    sequences, made = np.empty(len(sizes), dtype=np.int64), 0
    with_room: dict[int, list[int]] = defaultdict(list)  # sequences by the room that is left
    rooms: list[int] = []  # the rooms that there are, ascending
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
