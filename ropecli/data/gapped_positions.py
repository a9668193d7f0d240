"""Positions with gaps: short sequences that cover a longer context length.

`pose`: Zhu et al. 2023, arXiv:2309.10400, section 3.2, equations 3 and 4. A sequence is split into N chunks of random
lengths. The positions of chunk i are shifted by a skipping bias u_i, uniform on {u_{i-1}, ..., context length −
length}, with u_0 = 0. The paper does not specify the distribution of the chunk lengths; here all splits are equally
likely (the authors' code for N = 2 keeps the first chunk in the first half). The text skips along, v_i = u_i in
equation 5, an alternative that the paper mentions, so that text is as far apart as its positions. The text stops
skipping at the document's end (`SourceSequences.skipping_at`): a document only needs to fill a sequence, not the
context length.

`randomized`: Ruoss et al. 2023, arXiv:2305.16843, section 3. Positions are drawn from the context length without
replacement and sorted. They are shifted to start at 0: RoPE only sees differences, and transformers treats position 0
as the start of a document.
"""

import numpy as np

from ropecli.data.sampling import seeded_generator
from ropecli.errors import RecipeError


def refuse_impossible_positions(kind: str, length: int, context_length: int, chunks: int) -> None:
    """Raise RecipeError if sequences of `length` tokens cannot have positions of this kind."""
    if kind == "full":
        return
    if context_length < length:
        raise RecipeError(
            f"positions: {kind} cannot fit sequences of {length} tokens into {context_length} positions. "
            "Use a longer context or shorter sequences."
        )
    if kind == "pose" and chunks > length:
        raise RecipeError(f"pose_chunks: {chunks} chunks need at least {chunks} tokens, but a sequence has {length}.")


def positions_of(kind: str, length: int, context_length: int, chunks: int, seed: int, at: int) -> np.ndarray:
    """Positions of a sequence, shape (length,), int64, increasing from 0 to at most context_length − 1.

    at: index of the sequence in the stream; part of the random seed, so positions differ in every epoch.
    """
    if kind == "full":
        return np.arange(length)
    draw = seeded_generator(seed, "positions", at)
    if kind == "randomized":
        drawn = np.sort(draw.choice(context_length, length, replace=False, shuffle=False))
        return drawn - drawn[0]
    borders = 1 + np.sort(draw.choice(length - 1, chunks - 1, replace=False, shuffle=False))
    bias, positions = 0, np.arange(length)
    for start, stop in zip(borders, [*borders[1:], length], strict=True):
        bias = int(draw.integers(bias, context_length - length, endpoint=True))
        positions[start:stop] += bias
    return positions
