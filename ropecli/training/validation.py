"""Validation: perplexity on held-out text during training, at short and long lengths.

It changes neither weights nor random state: a run with validation ends in the same bits as one without.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ropecli.checkpoint.opening import Checkpoint
from ropecli.checkpoint.state import read_state
from ropecli.config.fields import section_of
from ropecli.data.documents import Document, Documents, read_documents
from ropecli.data.sequences import UNSCORED
from ropecli.data.sources import TO_MEASURE, read_texts
from ropecli.data.stream import Batch
from ropecli.errors import DataError, NotFiniteError, RecipeError
from ropecli.evaluation.protocols import Protocol
from ropecli.live.rotary import reset_tables, rotary_tables, switches_with_length, unpatched_after
from ropecli.training.distributed import data_ranks, local_batch, sequence_ranks
from ropecli.training.loss import explain_out_of_memory
from ropecli.training.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Validation:
    """Perplexity by the protocol `tail`: the same tokens are scored at all lengths, so that they can be compared.

    Windows go through the training's own loss, so the engine splits them between processes as it splits batches.
    lengths: tokens, ascending. documents: each as long as the longest of them. every, steps: of the run.
    """

    documents: Documents
    lengths: tuple[int, ...]
    protocol: Protocol
    every: int
    steps: int

    def due(self, step: int) -> bool:
        """Before the first step, after each `every`, and after the last."""
        return step % self.every == 0 or step == self.steps

    def run(self, accelerator: "Accelerator", wrapped: torch.nn.Module, step: int) -> dict[str, Any]:
        """A line for metrics.jsonl: {"step": 50, "ppl": {"256": 13.2, "1024": 11.8}, "protocol": "tail", ...}.

        wrapped: the NextTokenLoss that Accelerate prepared. To be called by all processes at once, between updates.
        Raises NotFiniteError, and RopecliError where memory does not suffice.
        """
        with _evaluation_mode(accelerator, wrapped, self.lengths[-1]) as reset:
            losses = {length: self._nll(accelerator, wrapped, length, reset) for length in self.lengths}
        for length, nll in losses.items():
            if not math.isfinite(nll):
                raise NotFiniteError(
                    f"After step {step} the loss on held-out text is {nll:g} at {length} tokens. Lower learning_rate, "
                    f"or leave {length} out of eval_lengths."
                )
        return {
            "step": step,
            # exp of more overflows a float64
            "ppl": {str(length): math.exp(min(nll, 700.0)) for length, nll in losses.items()},
            "protocol": self.protocol.name,
            "documents": len(self.documents.kept),
            "tokens": len(self.documents.kept) * (self.protocol.targets or 0),
        }

    def _nll(
        self, accelerator: "Accelerator", wrapped: torch.nn.Module, length: int, reset: Callable[[], None]
    ) -> float:
        """Mean over all documents, nats per token."""
        total = torch.zeros(2, dtype=torch.float64)
        pass_size, remedy = f"Perplexity at {length} tokens", f"Leave {length} out of eval_lengths."
        for document in self._share(accelerator):
            for window in self.protocol.windows(document, self.documents.special, length, self.lengths[-1]):
                reset()
                batch = _batch(window.ids, window.targets)
                with local_batch(accelerator, batch) as part, explain_out_of_memory(pass_size, remedy):
                    nll = wrapped(*part)
                total += torch.tensor([float(nll), int((part.labels != UNSCORED).sum())], dtype=torch.float64)
        if accelerator.num_processes > 1:
            total = accelerator.reduce(total.to(accelerator.device)).cpu()
        return float(total[0] / total[1])

    def _share(self, accelerator: "Accelerator") -> tuple[Document, ...]:
        """This process's documents: the same number for each, as all processes gather split weights at once.

        Where they do not divide evenly, several processes read the same; that cancels in the mean.
        """
        rank, ranks = data_ranks(accelerator)
        parts = math.gcd(len(self.documents.kept), ranks)
        return self.documents.kept[rank % parts :: parts]


def make_validation(
    recipe: Recipe,
    checkpoint: Checkpoint,
    tokenizer: Any,
    longest: int,
    accelerator: "Accelerator",
    say: Callable[[str], None] = lambda message: None,
) -> Validation | None:
    """Read the recipe's eval_data, so that faults show before training; None without eval_data.

    longest: tokens that the positions of the training sequences span. say: given what is measured, and a warning of
    text that is trained on. Raises DataError, and RecipeError for lengths that the processes cannot share.
    """
    if recipe.eval_data is None:
        return None
    pretrained = read_state(checkpoint).pretraining_length
    lengths = tuple(sorted(set(recipe.eval_lengths or (pretrained, longest))))
    _refuse_unshared(lengths, checkpoint, accelerator)
    try:
        texts = read_texts(recipe.eval_data, text_column=recipe.text_column, splits=TO_MEASURE)
        documents = read_documents(texts, tokenizer, lengths[-1], most=recipe.eval_documents, cut=lengths[-1])
    except DataError as error:
        raise DataError(f"eval_data: {error} Set eval_lengths to shorter ones, or use other text.") from error
    if recipe.eval_data in [source.data for source in recipe.sources]:
        say(f"warning: eval_data, {recipe.eval_data}, is not held out: it is trained on, so perplexity is too low.")
    say(
        f"Perplexity on {len(documents.kept)} documents of {recipe.eval_data} at {', '.join(map(str, lengths))} tokens."
    )
    protocol = Protocol("tail").settled(list(lengths), documents.special)
    return Validation(documents, lengths, protocol, recipe.eval_every, recipe.steps)


def _refuse_unshared(lengths: tuple[int, ...], checkpoint: Checkpoint, accelerator: "Accelerator") -> None:
    """Raises RecipeError for what processes that share sequences cannot measure."""
    ranks, sizes = sequence_ranks(accelerator), accelerator.parallelism_config
    # context parallelism gives each process an early and a late part
    parts = 2 * ranks if sizes and sizes.cp_enabled else ranks
    if ranks > 1 and section_of(checkpoint.config).get("attention_dropout"):
        raise RecipeError("eval_data: with attention_dropout, sequences shared among processes cannot be measured.")
    if uneven := [length for length in lengths if length % parts]:
        raise RecipeError(
            f"eval_lengths: {uneven[0]} tokens cannot be shared among {ranks} processes; give multiples of {parts}."
        )


def _batch(ids: np.ndarray, targets: int) -> Batch:
    """One sequence, of which the last `targets` tokens are scored. ids: shape (tokens,), int64."""
    labels = np.full((1, len(ids)), UNSCORED, dtype=np.int64)
    labels[0, -1 - targets : -1] = ids[-targets:]
    return Batch(ids[None], labels)


@contextlib.contextmanager
def _evaluation_mode(
    accelerator: "Accelerator", wrapped: torch.nn.Module, longest: int
) -> Iterator[Callable[[], None]]:
    """The model in evaluation mode and without gradients; afterwards all is as before.

    Yields a function to call before each window: rotary tables that follow the length remember the longest.
    """
    training = [module for module in wrapped.modules() if module.training]
    model = accelerator.unwrap_model(wrapped).model
    tables = rotary_tables(model)
    with torch.no_grad(), unpatched_after(model):
        following = tables if switches_with_length(tables, longest) else []
        _set_evaluation_mode(wrapped, shared=sequence_ranks(accelerator) > 1)
        try:
            yield lambda: reset_tables(following)
        finally:
            for module in training:
                module.training = True
            _reshard(wrapped)


def _set_evaluation_mode(wrapped: torch.nn.Module, *, shared: bool) -> None:
    """Set evaluation mode; on the innermost modules alone, dropout among them, where processes share sequences.

    DeepSpeed's Ulysses attention exchanges nothing for a module in evaluation mode: each process would read its part
    of the sequence as if it were the whole.
    """
    for module in wrapped.modules() if shared else [wrapped]:
        if not shared or not any(module.children()):
            module.eval()


def _reshard(wrapped: torch.nn.Module) -> None:
    """FSDP2 leaves the outermost weights gathered after a forward pass that no backward pass follows."""
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        for module in wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
