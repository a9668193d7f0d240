"""The true key among others by its log-probability: works for every causal LM, however small or untaught.

The other candidates are keys of the same form: those of the other needles in the prompt, and some that stand nowhere
in it. They are drawn to be of as many tokens as the true key, so that sums of log-probabilities compare like with like;
where a tokenizer has not enough such numbers, sums over unequal numbers of tokens are compared as they are. A tie goes
against the true key.
"""

from typing import NamedTuple

import numpy as np

from ropecli.errors import RopecliError
from ropecli.evaluation.retrieval.prompts import Prompt
from ropecli.evaluation.retrieval.reading import PromptReader


class Found(NamedTuple):
    """One trial. rank: of the true key, 1 the first. margin: its log-probability less the best other's, nats."""

    hit: bool
    rank: int | None = None
    margin: float | None = None


def rank_answers(reader: PromptReader, prompt: Prompt) -> Found:
    """Raises RopecliError for a log-probability that is not finite."""
    values = reader.log_probabilities(prompt.ids, prompt.answers)
    if not np.isfinite(values).all():
        tokens = len(prompt.ids) + len(prompt.answers[0])
        raise RopecliError(
            f"A log-probability is not finite at length {tokens}: the model overflows there. Another --dtype may help."
        )
    true, others = values[0], values[1:]
    rank = 1 + int((others >= true).sum())
    return Found(rank == 1, rank, float(true - others.max()))
