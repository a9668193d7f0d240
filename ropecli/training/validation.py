"""Validation: losses on held-out text during training.

It changes neither weights nor random state: a run with validation ends with the same bits as one without, unless it
chooses the step.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
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

TIMED_STEPS = 2
"""Steps after which their number is set, if the time decides."""
Scored = tuple[np.ndarray, np.ndarray]
"""The ids of a text, and whether each is scored; shape (tokens,) both."""


@dataclass
class Scoring(ABC):
    """Scores texts with the training loss, so that the engine splits them between processes like batches.

    steps: of the run; None while the time of a step is not known.
    """

    steps: int | None

    @property
    @abstractmethod
    def texts(self) -> Mapping[str, Sequence[Scored]]:
        """By what they are, in words."""

    @abstractmethod
    def line(self, losses: Sequence[float]) -> dict[str, Any]:
        """What metrics.jsonl says of the losses of the texts, nats per token."""

    @abstractmethod
    def words(self, line: Mapping[str, Any]) -> str:
        """The same for the terminal."""

    def affordable(self, seconds: float) -> int:
        """The steps for which there is time, if one takes these seconds. Called on the main process."""
        raise NotImplementedError

    def follow(self, line: Mapping[str, Any]) -> None:  # noqa: B027
        """Take note of a line of metrics.jsonl, also of the run that is resumed."""

    @property
    def best(self) -> int | None:
        """The step to keep; None for the last one."""
        return None

    @property
    def ended(self) -> bool:
        """Whether more steps would not help."""
        return False

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether to measure after this step; 0: before the first."""

    def run(self, launch: Launch, wrapped: torch.nn.Module, step: int) -> dict[str, Any]:
        """Return a line for metrics.jsonl: {"step": 50, "ppl": {"256": 13.2, "1024": 11.8}, "protocol": "tail", ...}.

        wrapped: the NextTokenLoss prepared by Accelerate. All processes call it together, between updates. Raises
        NotFiniteError, and RopecliError if memory runs out.
        """
        longest = max(len(ids) for texts in self.texts.values() for ids, _ in texts)
        with _evaluation_mode(launch, wrapped, longest) as reset:
            losses = []
            for name, texts in self.texts.items():
                with explain_out_of_memory(f"The loss of {name}", "Use a shorter --length or eval_lengths."):
                    losses.append(nll := _mean_loss(launch, wrapped, texts, reset))
                if not math.isfinite(nll):
                    raise NotFiniteError(
                        f"The loss of {name} is {nll:g} nats after step {step}. Lower --learning-rate."
                    )
        return {"step": step, **self.line(losses)}


def _mean_loss(launch: Launch, wrapped: torch.nn.Module, texts: Sequence[Scored], reset: Callable[[], None]) -> float:
    """Mean negative log-likelihood over all texts, nats per token."""
    total = torch.zeros(2, dtype=torch.float64)
    # all processes read the same number of texts, since they gather sharded weights together; if they do not divide
    # evenly, several read the same ones, which cancels in the mean
    parts = math.gcd(len(texts), launch.data_ranks)
    for ids, scored in texts[launch.data_rank % parts :: parts]:
        reset()
        labels = np.append(np.where(scored, ids, UNSCORED)[1:], UNSCORED)
        part = launch.take(Batch(ids[None], labels[None]))
        total += torch.tensor([float(wrapped(*part)), int((part.labels != UNSCORED).sum())], dtype=torch.float64)
    nll, targets = launch.total(*total)
    return nll / targets


@dataclass
class Validation(Scoring):
    """Measures perplexity with the protocol `tail`, which scores the same tokens at all lengths for comparison.

    every: steps between measurements. lengths: tokens, ascending. documents: each as long as the longest length.
    """

    every: int
    documents: Documents
    lengths: tuple[int, ...]
    protocol: Protocol

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    @cached_property
    def texts(self) -> Mapping[str, Sequence[Scored]]:
        return {
            f"held-out text at {length} tokens": [
                (window.ids, window.scored)
                for document in self.documents.kept
                for window in self.protocol.windows(document, self.documents.special, length, self.lengths[-1])
            ]
            for length in self.lengths
        }

    def line(self, losses: Sequence[float]) -> dict[str, Any]:
        perplexities = (math.exp(min(nll, LARGEST_NLL)) for nll in losses)
        return {
            "ppl": dict(zip(map(str, self.lengths), perplexities, strict=True)),
            "protocol": self.protocol.name,
            "documents": len(self.documents.kept),
            "tokens": len(self.documents.kept) * (self.protocol.targets or 0),
        }

    def words(self, line: Mapping[str, Any]) -> str:
        perplexities = ", ".join(f"{ppl:.2f} at {length} tokens" for length, ppl in line["ppl"].items())
        return f"perplexity {perplexities}"


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
        texts = Source(recipe.eval_data, recipe.text_column).texts()
        documents = read_documents(texts, tokenizer, lengths[-1], most=recipe.eval_documents, cut=lengths[-1])
    except DataError as error:
        raise DataError(f"--eval-data: {error}") from error
    if recipe.eval_data in [source.data for source in recipe.sources]:
        say(f"warning: --eval-data {recipe.eval_data} is not held out: training uses it, so perplexity is too low.")
    listed = ", ".join(map(str, lengths))
    say(f"Measuring perplexity on {len(documents.kept)} documents of {recipe.eval_data} at {listed} tokens.")
    protocol = Protocol("tail").for_lengths(list(lengths), documents.special)
    return Validation(recipe.steps, recipe.eval_every, documents, lengths, protocol)


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
