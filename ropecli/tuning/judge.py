"""How good a tuned model is: one number from calibration documents, by which points are compared.

The `tail` protocol scores the same last tokens of every document, once read with the target's context and once with
the pretraining window's: the first says what the extension is worth, the second what it costs inside the old window.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ropecli.data.documents import Documents
from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.saved_progress import EvalProgress
from ropecli.tuning.record import Score

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Judge:
    """window, target: tokens. short_weight: what a nat at the window counts, held against one at the target.

    targets: tokens scored of each document. progress: keeps what was measured, so that it is not measured again.
    """

    documents: Documents
    window: int
    target: int
    short_weight: float
    targets: int
    progress: EvalProgress

    def score(self, model: "PreTrainedModel", part: str, count: int | None = None) -> Score:
        """By the first `count` documents, or all. part: names the model's state, for the progress.

        Raises RopecliError for a loss that is not finite.
        """
        documents = replace(self.documents, kept=self.documents.kept[:count])
        lengths = sorted({self.window, self.target})
        rows = evaluate_perplexity(
            model,
            documents,
            lengths,
            protocol=Protocol("tail", targets=self.targets),
            progress=self.progress,
            part=part,
        )
        window, target = rows[0].nll, rows[-1].nll
        return Score(target, window, target + self.short_weight * window, len(documents.kept))
