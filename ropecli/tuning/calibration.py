"""Calibration documents, and the score of a model on them.

Some documents are for training, the others for scoring. The `tail` protocol scores the same last tokens of each
document, read at the target length and at the pretraining length. The first measures the gain of the extension, the
second its cost at the pretraining length.

`mark_keys` scores only the tokens at the target length that need a long context (LongPPL, evaluation/tasks/keys.py).
`hide_needles` replaces the documents for scoring by prompts that end with a key hidden at their beginning, as LongRoPE2
does: Shang et al. 2025 (arXiv:2502.20082), section 3.2.
"""

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.patch_plan import PatchPlan, make_plan
from ropecli.checkpoint.state import Positions
from ropecli.data.documents import Document, Documents, read_documents
from ropecli.data.sources import DEMO, Source
from ropecli.errors import DataError
from ropecli.evaluation.driver import Store, read
from ropecli.evaluation.prompt_pieces import Haystack, PieceTokenizer
from ropecli.evaluation.protocols import Protocol, ShortContext
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.report import Cell
from ropecli.evaluation.retrieval_prompts import Prompt, RetrievalPrompts, Templates
from ropecli.evaluation.subject import loading_request
from ropecli.evaluation.tasks.keys import FindKeys
from ropecli.evaluation.tasks.perplexity import Perplexity
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
    """evaluated: documents for scoring. sequences: token ids of the others, shape (sequences, target length).

    short: documents to score at the pretraining length; None: the same. targets: tokens scored per document, if the
    settings do not determine it.
    """

    evaluated: Documents
    sequences: Tensor
    short: Documents | None = None
    targets: int | None = None

    def fingerprint(self) -> str:
        """sha256 of all documents."""
        return hashlib.sha256(self.evaluated.fingerprint().encode() + self.sequences.numpy().tobytes()).hexdigest()


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
    if source.place == DEMO:
        raise DataError("'demo' is the held-out text for eval-ppl; calibrate on 'demo-train' instead.")
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


def mark_keys(
    calibration: Calibration, evaluator: "PreTrainedModel", context: ShortContext, original_length: int
) -> Calibration:
    """Keep the documents for scoring that have key tokens, and mark these; at the pretraining length, read their ends.

    evaluator: finds the key tokens; reads the same token ids. Raises DataError if fewer than two documents have any.
    """
    documents = calibration.evaluated
    length = len(documents.kept[0].ids)
    if length <= context.first:
        raise DataError(
            f"The target length is {length} tokens; longppl needs more than {context.first}, because the evaluator has "
            f"a short context of {context.tokens}. Use a larger factor."
        )
    keys = read(FindKeys(documents, context, length), LiveReader(evaluator)).values()
    kept = [replace(document, keys=np.array(at)) for document, at in zip(documents.kept, keys, strict=True) if at]
    if len(kept) < 2:
        raise DataError(
            f"{len(kept)} of {len(keys)} documents have key tokens; expected at least 2. Use a larger factor, other "
            "data, or an evaluator that uses its context better."
        )
    prefix = np.array(documents.special.prefix, dtype=np.int64)
    first = length - original_length + len(prefix)
    short = [Document(document.name, np.concatenate([prefix, document.ids[first:]])) for document in kept]
    return replace(
        calibration, evaluated=replace(documents, kept=tuple(kept)), short=replace(documents, kept=tuple(short))
    )


def hide_needles(
    calibration: Calibration, tokenizer: Any, templates: Templates, original_length: int, target_length: int, seed: int
) -> Calibration:
    """Replace the documents for scoring by needle prompts with their keys, at both lengths.

    The needle is at the beginning of the text. Raises DataError for a length that is too short for a prompt.
    """
    pieces, documents = PieceTokenizer(tokenizer), calibration.evaluated

    def prompts(length: int) -> list[Prompt]:
        texts = [Haystack(documents.special.bare(document.ids), anywhere=False) for document in documents.kept]
        tasks = [RetrievalPrompts("needle", templates, text, pieces, candidates=2, seed=seed) for text in texts]
        return [task.prompt(length, 0.0, index) for index, task in enumerate(tasks)]

    def with_keys(prompts: list[Prompt]) -> Documents:
        ids = [np.array([*prompt.ids, *prompt.answers[0]], dtype=np.int64) for prompt in prompts]
        return replace(documents, kept=tuple(map(Document, (document.name for document in documents.kept), ids)))

    at_target, short = prompts(target_length), prompts(original_length)
    return replace(
        calibration,
        evaluated=with_keys(at_target),
        short=with_keys(short),
        targets=min(len(prompt.answers[0]) for prompt in (*at_target, *short)),
    )


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

    @property
    def targets(self) -> int | None:
        """Tokens scored per document; None: half the pretraining length."""
        return self.calibration.targets or self.settings.targets

    def plan(self, spec: ScalingSpec) -> PatchPlan:
        return make_plan(self.checkpoint, spec, original_length=self.settings.original_length)

    def settings_values(self) -> dict[str, Any]:
        """The settings as stored in tune.json. Raises DataError for targets that do not fit the lengths."""
        lengths = sorted({self.positions.pretraining_length, self.positions.context_length})
        protocol = Protocol("tail", targets=self.targets)
        return {
            **asdict(self.settings),
            "methods": list(self.settings.methods),
            "targets": protocol.settled(lengths, self.calibration.evaluated.special).targets,
            "judged": len(self.calibration.evaluated.kept),
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
class Evaluator:
    """Scores a model on documents.

    original_length, target_length: tokens. short_weight: weight of the loss at the pretraining length, relative to that
    at the target length. targets: tokens scored per document; None: half the pretraining length. store: where
    measurements are saved; saved ones are not repeated. short: documents to score at the pretraining length; None: the
    same.
    """

    documents: Documents
    original_length: int
    target_length: int
    short_weight: float
    targets: int | None
    store: Store
    short: Documents | None = None

    def score(self, model: "PreTrainedModel", part: str, count: int | None = None) -> tuple[Score, float]:
        """Score the first `count` documents (default: all). Returns the score and the seconds it took when measured.

        part: name of the model's state in the store. Raises RopecliError for a loss that is not finite.
        """
        lengths = sorted({self.original_length, self.target_length})
        readings = [(self.documents, lengths, part)]
        if self.short is not None and len(lengths) == 2:
            readings = [(self.short, lengths[:1], f"{part}, short"), (self.documents, lengths[1:], part)]
        cells: list[Cell] = []
        for documents, read_lengths, name in readings:
            few = replace(documents, kept=documents.kept[:count])
            with_keys = few.kept[0].keys is not None
            protocol = Protocol("longppl") if with_keys else Protocol("tail", targets=self.targets)
            task = Perplexity(few, read_lengths, protocol)
            cells += task.cells(read(task, LiveReader(model), self.store, name))
        short, target = cells[0].value, cells[-1].value
        score = Score(target, short, target + self.short_weight * short, len(self.documents.kept[:count]))
        return score, sum(cell.seconds for cell in cells)
