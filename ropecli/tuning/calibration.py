"""Calibration documents, and the score of a model on them.

Some documents are sequences to learn from; the others are never learned from, and give the score. The `tail` protocol
scores the same last tokens of every document, once with the target's context and once with the pretraining length's:
the first says what the extension is worth, the second what it costs at the pretraining length.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ropecli.data.documents import Documents, read_documents
from ropecli.data.sources import DEMO, TO_TRAIN, read_texts
from ropecli.errors import DataError
from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.saved_progress import EvalProgress
from ropecli.tuning.tune_report import Score

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_EVALUATED = 16
"""Documents for the score, at most."""
_FEWEST = 4
"""Different documents; of few one in four is for the score."""


@dataclass(frozen=True)
class Calibration:
    """evaluated: documents of the target's length. sequences: token ids, shape (sequences, target), of others."""

    evaluated: Documents
    sequences: Tensor

    def fingerprint(self) -> str:
        """sha256 of all that is read."""
        return hashlib.sha256(self.evaluated.fingerprint().encode() + self.sequences.numpy().tobytes()).hexdigest()


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

    Those that begin alike count as one: else the score could read one that was learned from. most: read at most so
    many; None for all. advance: called after each document. Raises DataError where there are fewer than four.
    """
    if source == DEMO:
        raise DataError("'demo' is the held-out text that eval-ppl measures on; calibrate on 'demo-train'.")
    texts = read_texts(source, text_column=text_column, split=split, splits=TO_TRAIN)
    documents = read_documents(texts, tokenizer, target, most=most, cut=target, advance=advance)
    different = list({document.ids.tobytes(): document for document in documents.kept}.values())
    if len(different) < _FEWEST:
        raise DataError(
            f"{source} has too few different documents of {target} tokens: {len(different)} of the "
            f"{len(documents.kept)} read; at least {_FEWEST} are needed, some to learn from and some to judge by."
        )
    order = np.random.default_rng(seed).permutation(len(different))
    shuffled = [different[index] for index in order]
    count = min(MOST_EVALUATED, max(2, len(shuffled) // _FEWEST))
    evaluated = replace(documents, kept=tuple(shuffled[:count]))
    return Calibration(evaluated, torch.stack([torch.from_numpy(document.ids) for document in shuffled[count:]]))


@dataclass(frozen=True)
class Evaluator:
    """Gives the score of a model on documents: one number, by which points are compared.

    original_length, target_length: tokens. short_weight: what a nat at the pretraining length counts, held against one
    at the target length.

    targets: tokens scored of each document. progress: keeps what was measured, so that it is not measured again.
    """

    documents: Documents
    original_length: int
    target_length: int
    short_weight: float
    targets: int
    progress: EvalProgress

    def score(self, model: "PreTrainedModel", part: str, count: int | None = None) -> Score:
        """By the first `count` documents, or all. part: names the model's state, for the progress.

        Raises RopecliError for a loss that is not finite.
        """
        return self.timed_score(model, part, count)[0]

    def timed_score(self, model: "PreTrainedModel", part: str, count: int | None = None) -> tuple[Score, float]:
        """With the seconds that it took, in whichever run it was measured."""
        documents = replace(self.documents, kept=self.documents.kept[:count])
        lengths = sorted({self.original_length, self.target_length})
        protocol = Protocol("tail", targets=self.targets)
        rows = evaluate_perplexity(model, documents, lengths, protocol=protocol, progress=self.progress, part=part)
        short, target = rows[0].nll, rows[-1].nll
        score = Score(target, short, target + self.short_weight * short, len(documents.kept))
        return score, sum(row.seconds for row in rows)
