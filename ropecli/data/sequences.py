"""Training sequences of one length, in a seeded order that depends on the position alone."""

from functools import lru_cache

import numpy as np

from ropecli.data.documents import Documents


class Sequences:
    """Consecutive, non-overlapping sequences of `length` tokens, none across two documents.

    dropped_tokens: those at documents' ends that fill no sequence.
    """

    def __init__(self, documents: Documents, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        cut = [document.ids[: len(document.ids) // length * length].reshape(-1, length) for document in documents.kept]
        self.rows = np.concatenate(cut)
        self.dropped_tokens = sum(len(document.ids) for document in documents.kept) - self.rows.size

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, position: int) -> np.ndarray:
        """The sequence at a position of the endless stream, shape (length,): every epoch in an order of its own."""
        epoch, index = divmod(position, len(self.rows))
        return self.rows[_order(self.seed, epoch, len(self.rows))[index]]

    def batch(self, positions: range) -> np.ndarray:
        """Shape (len(positions), length), int64."""
        return np.stack([self.at(position) for position in positions])


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(size)
