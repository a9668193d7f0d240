"""Calibration documents, and the score of a model on them.

Some documents are for training, the others for scoring. The `tail` protocol scores the same last tokens of each
document, read at the target length and at the pretraining length. The first measures the gain of the extension, the
second its cost at the pretraining length.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import Positions
from ropecli.data.documents import Documents, read_documents
from ropecli.data.sources import Source
from ropecli.errors import DataError
from ropecli.evaluation.driver import Store, Task, score_samples
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.subject import loading_request
from ropecli.evaluation.tasks.perplexity import Perplexity
from ropecli.hashing import digest
from ropecli.names import refuse_held_out
from ropecli.scaling.spec import ScalingSpec
from ropecli.tuning.task import Score, TuneSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_EVALUATED = 16
"""Maximum number of documents for scoring."""
_MIN_DOCUMENTS = 4
"""Minimum number of distinct documents; also, one in this many is for scoring."""


@dataclass(frozen=True)
class Calibration:
    """evaluated: documents for scoring. sequences: token ids of the others, shape (sequences, target length)."""

    evaluated: Documents
    sequences: Tensor

    def fingerprint(self) -> str:
        """sha256 of all documents."""
        return digest(self.evaluated.fingerprint(), self.sequences.numpy())


def read_calibration(
    source: Source,
    tokenizer: Any,
    target: int,
    *,
    most: int | None,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> Calibration:
    """Read the documents of `source` with at least `target` tokens, cut to that length and shuffled with the seed.

    Documents with the same first `target` tokens count as one, so that no document is used for both training and
    scoring. most: maximum number of documents to read; None for all. advance: called after each document. Raises
    DataError for fewer than four documents.
    """
    refuse_held_out(source.place)
    documents = read_documents(source.texts(), tokenizer, target, most=most, cut=target, advance=advance)
    different = list({document.ids.tobytes(): document for document in documents.kept}.values())
    if len(different) < _MIN_DOCUMENTS:
        raise DataError(
            f"{source.place} has too few distinct documents of {target} tokens: {len(different)} of "
            f"{len(documents.kept)}; expected at least {_MIN_DOCUMENTS} for training and scoring."
        )
    order = np.random.default_rng(seed).permutation(len(different))
    shuffled = [different[index] for index in order]
    count = min(MOST_EVALUATED, max(2, len(shuffled) // _MIN_DOCUMENTS))
    evaluated = replace(documents, kept=tuple(shuffled[:count]))
    return Calibration(evaluated, torch.stack([torch.from_numpy(document.ids) for document in shuffled[count:]]))


@dataclass(frozen=True)
class TuningTask:
    """The checkpoint to tune and everything that the result depends on.

    baseline: the patch to compare with: the default constants of the first method that has defaults. loading: the
    arguments of load_model.
    """

    checkpoint: Checkpoint
    settings: TuneSettings
    source: str
    tokenizer: Any
    baseline: PatchPlan
    calibration: Calibration
    loading: dict[str, Any] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        return self.baseline.spec.factor

    @property
    def positions(self) -> Positions:
        return self.baseline.positions

    def plan(self, spec: ScalingSpec) -> PatchPlan:
        return make_plan(self.checkpoint, spec, original_length=self.settings["original_length"], in_memory=True)

    def settings_values(self) -> dict[str, Any]:
        """The settings as stored in tune.json. Raises DataError for targets that do not fit the lengths."""
        lengths = sorted({self.positions.pretraining_length, self.positions.context_length})
        protocol = Protocol("tail", targets=self.settings["targets"])
        return {
            **self.settings,
            "targets": protocol.for_lengths(lengths, self.calibration.evaluated.special).targets,
            "evaluated": len(self.calibration.evaluated.kept),
            "sequences": len(self.calibration.sequences),
        }

    def request(self) -> dict[str, Any]:
        """Everything that the results depend on. A run resumes only if it is unchanged."""
        return {
            "checkpoint": self.checkpoint.digest(),
            "factor": self.factor,
            "pretraining_length": self.positions.pretraining_length,
            "target": self.positions.context_length,
            **self.settings_values(),
            "data": self.calibration.fingerprint(),
            **loading_request(self.loading),
        }


@dataclass(frozen=True)
class PointScorer:
    """Scores a model on documents.

    original_length, target_length: tokens. short_weight: weight of the loss at the pretraining length, relative to that
    at the target length. targets: tokens scored per document; None: half the pretraining length. store: where
    measurements are saved; saved ones are not repeated.
    """

    documents: Documents
    original_length: int
    target_length: int
    short_weight: float
    targets: int | None
    store: Store

    def score(self, model: "PreTrainedModel", part: str, count: int | None = None) -> tuple[Score, float]:
        """Score the first `count` documents (default: all). Returns the score and the seconds it took when measured.

        part: name of the model's state in the store. Raises RopecliError for a loss that is not finite.
        """
        documents = replace(self.documents, kept=self.documents.kept[:count])
        task = self.objective(documents)
        cells = task.cells(score_samples(task, LiveReader(model), self.store, part))
        short, target = cells[0].value, cells[-1].value
        score = Score(target, short, target + self.short_weight * short, len(documents.kept))
        return score, sum(cell.seconds for cell in cells)

    def objective(self, documents: Documents) -> Task:
        """The task that scores a model: a cell per length, ascending, whose value is better the lower it is."""
        lengths = {self.original_length, self.target_length}
        return Perplexity(documents, lengths, Protocol("tail", targets=self.targets))
