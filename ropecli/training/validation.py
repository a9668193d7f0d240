"""Validation: perplexity on held-out text during training, at several lengths.

It changes neither weights nor random state: a run with validation ends with the same bits as one without.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ropecli.attention.head_layout import in_evaluation
from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.data.documents import Documents, read_documents
from ropecli.data.sequences import UNSCORED
from ropecli.data.sources import Source
from ropecli.data.stream import Batch
from ropecli.errors import DataError, NotFiniteError, RecipeError
from ropecli.evaluation.protocols import Protocol
from ropecli.evaluation.statistics import LARGEST_NLL
from ropecli.live.rotary import reset_tables, unpatched_after, varying_tables
from ropecli.training.launch import Launch
from ropecli.training.loss import explain_out_of_memory
from ropecli.training.recipe_schema import Recipe


@dataclass(frozen=True)
class Validation:
    """Measures perplexity with the protocol `tail`, which scores the same tokens at all lengths for comparison.

    Windows go through the training loss, so the engine splits them between processes like batches. lengths: tokens,
    ascending. documents: each as long as the longest length. every: steps between measurements. steps: of the run.
    """

    documents: Documents
    lengths: tuple[int, ...]
    protocol: Protocol
    every: int
    steps: int

    def due(self, step: int) -> bool:
        """Return True before the first step, every `every` steps, and after the last."""
        return step % self.every == 0 or step == self.steps

    def run(self, launch: Launch, wrapped: torch.nn.Module, step: int) -> dict[str, Any]:
        """Return a line for metrics.jsonl: {"step": 50, "ppl": {"256": 13.2, "1024": 11.8}, "protocol": "tail", ...}.

        wrapped: the NextTokenLoss prepared by Accelerate. All processes call it together, between updates. Raises
        NotFiniteError, and RopecliError if memory runs out.
        """
        with _evaluation_mode(launch, wrapped, self.lengths[-1]) as reset:
            losses = {length: self._nll(launch, wrapped, length, reset) for length in self.lengths}
        for length, nll in losses.items():
            if not math.isfinite(nll):
                raise NotFiniteError(
                    f"After step {step} the loss on held-out text is {nll:g} at {length} tokens. Lower learning_rate, "
                    f"or remove {length} from eval_lengths."
                )
        return {
            "step": step,
            "ppl": {str(length): math.exp(min(nll, LARGEST_NLL)) for length, nll in losses.items()},
            "protocol": self.protocol.name,
            "documents": len(self.documents.kept),
            "tokens": len(self.documents.kept) * (self.protocol.targets or 0),
        }

    def _nll(self, launch: Launch, wrapped: torch.nn.Module, length: int, reset: Callable[[], None]) -> float:
        """Mean negative log-likelihood over all documents, nats per token."""
        total = torch.zeros(2, dtype=torch.float64)
        pass_size, remedy = f"Perplexity at {length} tokens", f"Remove {length} from eval_lengths."
        # all processes read the same number of documents, since they gather sharded weights together; if they do not
        # divide evenly, several read the same ones, which cancels in the mean
        parts = math.gcd(len(self.documents.kept), launch.data_ranks)
        for document in self.documents.kept[launch.data_rank % parts :: parts]:
            for window in self.protocol.windows(document, self.documents.special, length, self.lengths[-1]):
                reset()
                labels = np.full((1, len(window.ids)), UNSCORED, dtype=np.int64)
                labels[0, -1 - window.targets : -1] = window.ids[-window.targets :]
                batch = Batch(window.ids[None], labels)
                part = launch.take(batch)
                with explain_out_of_memory(pass_size, remedy):
                    nll = wrapped(*part)
                total += torch.tensor([float(nll), int((part.labels != UNSCORED).sum())], dtype=torch.float64)
        nll, targets = launch.total(*total)
        return nll / targets


def make_validation(
    recipe: Recipe,
    checkpoint: Checkpoint,
    tokenizer: Any,
    longest: int,
    launch: Launch,
    say: Callable[[str], None] = lambda message: None,
) -> Validation | None:
    """Read the recipe's eval_data, so that faults show before training; None without eval_data.

    longest: tokens that the positions of the training sequences span. say: called with what is measured, and with a
    warning if training uses the same data. Raises DataError, and RecipeError for lengths that processes cannot share.
    """
    if recipe.eval_data is None:
        return None
    pretrained = read_state(checkpoint).positions.pretraining_length
    lengths = tuple(sorted(set(recipe.eval_lengths or (pretrained, longest))))
    if uneven := [length for length in lengths if length % launch.sequence_ranks]:
        raise RecipeError(f"eval_lengths has {uneven[0]} tokens; expected multiples of {launch.sequence_ranks}.")
    try:
        source = Source(recipe.eval_data, recipe.eval_text_column or recipe.text_column, recipe.eval_split)
        documents = read_documents(source.texts(), tokenizer, lengths[-1], most=recipe.eval_documents, cut=lengths[-1])
    except DataError as error:
        raise DataError(f"eval_data: {error}") from error
    if recipe.eval_data in [source.data for source in recipe.sources]:
        say(f"warning: eval_data {recipe.eval_data} is not held out: training uses it, so perplexity is too low.")
    listed = ", ".join(map(str, lengths))
    say(f"Measuring perplexity on {len(documents.kept)} documents of {recipe.eval_data} at {listed} tokens.")
    protocol = Protocol("tail").for_lengths(list(lengths), documents.special)
    return Validation(documents, lengths, protocol, recipe.eval_every, recipe.steps)


@contextlib.contextmanager
def _evaluation_mode(launch: Launch, wrapped: torch.nn.Module, longest: int) -> Iterator[Callable[[], None]]:
    """Use evaluation mode without gradients inside the block; restore everything on exit.

    Yields a function to call before each window, because length-dependent rotary tables remember the longest one.
    """
    model = launch.accelerator.unwrap_model(wrapped).model
    with torch.no_grad(), unpatched_after(model), in_evaluation(wrapped):
        following = varying_tables(model, longest)
        try:
            yield lambda: reset_tables(following)
        finally:
            # FSDP2 keeps the outermost weights gathered after a forward pass without a backward pass
            for module in wrapped.modules():
                reshard: Any = getattr(module, "reshard", None)
                if reshard:
                    reshard()
