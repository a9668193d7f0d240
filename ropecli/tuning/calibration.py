"""Calibration documents, and the score of a model on them.

Some documents are trained on; the others give the score. The `tail` protocol scores the same last tokens of every
document, once with the target length as context and once with the pretraining length: the first shows what the
extension gains, the second what it costs at the pretraining length.
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
"""Different documents, at least; one in so many is for the score."""


@dataclass(frozen=True)
class Calibration:
    """evaluated: documents for the score. sequences: token ids of the others, shape (sequences, target length)."""

    evaluated: Documents
    sequences: Tensor

    def fingerprint(self) -> str:
        """sha256 of all documents."""
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
    """Reads the documents of `source` with at least `target` tokens, cut to that, in an order that follows the seed.

    Documents that begin alike count as one, so that no document is both trained on and scored. most: documents to
    read; None for all. advance: called after each document. Raises DataError for fewer than four documents.
    """
    if source == DEMO:
        raise DataError("'demo' is the held-out text that eval-ppl measures on; calibrate on 'demo-train'.")
    texts = read_texts(source, text_column=text_column, split=split, splits=TO_TRAIN)
    documents = read_documents(texts, tokenizer, target, most=most, cut=target, advance=advance)
    different = list({document.ids.tobytes(): document for document in documents.kept}.values())
    if len(different) < _FEWEST:
        raise DataError(
            f"{source} has too few different documents of {target} tokens: {len(different)} of the "
            f"{len(documents.kept)} read; at least {_FEWEST} are needed, some to train on and some to score."
        )
    order = np.random.default_rng(seed).permutation(len(different))
    shuffled = [different[index] for index in order]
    count = min(MOST_EVALUATED, max(2, len(shuffled) // _FEWEST))
    evaluated = replace(documents, kept=tuple(shuffled[:count]))
    return Calibration(evaluated, torch.stack([torch.from_numpy(document.ids) for document in shuffled[count:]]))


@dataclass(frozen=True)
class Evaluator:
    """Scores a model on documents.

    original_length, target_length: tokens. short_weight: weight of the loss at the pretraining length, relative to that
    at the target length. targets: tokens scored per document; None: half the pretraining length. progress: keeps what
    was measured, so that it is not measured again.
    """

    documents: Documents
    original_length: int
    target_length: int
    short_weight: float
    targets: int | None
    progress: EvalProgress

    def score(self, model: "PreTrainedModel", part: str, count: int | None = None) -> tuple[Score, float]:
        """The score on the first `count` documents, or all; and the seconds it took, in whichever run.

        part: names the model's state in the progress. Raises RopecliError for a loss that is not finite.
        """
        documents = replace(self.documents, kept=self.documents.kept[:count])
        lengths = sorted({self.original_length, self.target_length})
        protocol = Protocol("tail", targets=self.targets)
        rows = evaluate_perplexity(model, documents, lengths, protocol=protocol, progress=self.progress, part=part)
        short, target = rows[0].nll, rows[-1].nll
        score = Score(target, short, target + self.short_weight * short, len(documents.kept))
        return score, sum(row.seconds for row in rows)
