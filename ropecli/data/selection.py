"""Which documents of a source are used: the long ones, a share of the short ones, up to a budget of tokens.

Length upsampling within a source follows Fu et al. 2024, arXiv:2402.10171, section 3, and the code released with it:
documents of 4,096 tokens or more are kept, of shorter ones a tenth, and each source is read until its budget of
tokens, its share of the original mixture, is used up; so the mixture of sources stays and the lengths change. Here
lengths are counted in tokens, not estimated from characters; the last document is cut where the budget ends, not
taken whole; and a mixture's shares are weights of their own (`mixture.py`).
"""

from dataclasses import dataclass

import numpy as np

from ropecli.data.draws import generator


@dataclass(frozen=True)
class Selection:
    """documents: shape (used,), int64, ascending. lengths: the same shape, tokens used of each.

    too_short, not_drawn, over_budget: documents left out, of `of` documents. cut: whether the budget cut one.
    """

    documents: np.ndarray
    lengths: np.ndarray
    of: int
    too_short: int
    not_drawn: int
    over_budget: int
    cut: bool


def select(
    lengths: np.ndarray,
    least: int,
    *,
    long_from: int | None = None,
    keep_short: float = 1.0,
    max_tokens: int | None = None,
    seed: int = 0,
    source: int = 0,
) -> Selection:
    """lengths: of all documents, tokens. least: those shorter are never used. source: its number in the mixture.

    Whether a short document is kept hangs on the seed and its number alone; so does the order in which documents
    are taken until they make `max_tokens`.
    """
    enough = lengths >= least
    drawn = enough
    if long_from is not None and keep_short < 1:
        chances = generator(seed, "keep short documents", source).random(len(lengths))
        drawn = enough & ((lengths >= long_from) | (chances < keep_short))
    documents = np.flatnonzero(drawn)
    used = lengths[documents]
    if max_tokens is not None:
        order = generator(seed, "budget of tokens", source).permutation(len(lengths))
        by_chance = np.argsort(order[documents], kind="stable")
        before = np.empty_like(used)
        before[by_chance] = np.cumsum(used[by_chance]) - used[by_chance]
        used = np.minimum(used, np.maximum(max_tokens - before, 0))
    within = used > 0
    return Selection(
        documents[within],
        used[within],
        of=len(lengths),
        too_short=int(len(lengths) - enough.sum()),
        not_drawn=int(enough.sum() - drawn.sum()),
        over_budget=int(len(documents) - within.sum()),
        cut=bool((used[within] < lengths[documents[within]]).any()),
    )
