"""Calibration documents, parted: sequences to learn from, and documents to judge by that are never learned from."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropecli.data.documents import Documents, read_documents
from ropecli.data.sources import TO_TRAIN, read_texts
from ropecli.errors import DataError
from ropecli.tuning.request import refuse_held_out

MOST_JUDGED = 16
"""Documents for the judge."""
_SHARE = 4
"""Of few documents one in so many is for the judge."""
_FEWEST = 4


@dataclass(frozen=True)
class Calibration:
    """judged: documents of the target's length. sequences: token ids, shape (sequences, target), of others."""

    judged: Documents
    sequences: Tensor

    def fingerprint(self) -> str:
        """sha256 of all that is read."""
        return hashlib.sha256(self.judged.fingerprint().encode() + self.sequences.numpy().tobytes()).hexdigest()


def read_calibration(
    source: str,
    tokenizer: Any,
    target: int,
    *,
    most: int | None,
    seed: int,
    text_column: str = "text",
    split: str | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Calibration:
    """The documents of `source` that have `target` tokens, the first so many of each, in an order drawn by the seed.

    Those that begin alike count as one: else one might be judged by that was learned from. most: read at most so many;
    None for all. advance: called after each document. Raises DataError where there are fewer than four.
    """
    refuse_held_out(source)
    texts = read_texts(source, text_column=text_column, split=split, splits=TO_TRAIN)
    documents = read_documents(texts, tokenizer, target, most=most, cut=target, advance=advance)
    different = list({document.ids.tobytes(): document for document in documents.kept}.values())
    if len(different) < _FEWEST:
        among = f" among the {most} that are read" if most and len(documents.kept) == most else ""
        raise DataError(
            f"{source} has too few different documents of {target} tokens: {len(different)}{among}; at least {_FEWEST} "
            "are needed, some to learn from and some to judge by."
        )
    order = np.random.default_rng(seed).permutation(len(different))
    shuffled = [different[index] for index in order]
    count = min(MOST_JUDGED, max(2, len(shuffled) // _SHARE))
    judged = replace(documents, kept=tuple(shuffled[:count]))
    return Calibration(judged, torch.stack([torch.from_numpy(document.ids) for document in shuffled[count:]]))
