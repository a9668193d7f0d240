"""Positions with gaps, which reach through a context length that is longer than the sequence.

`pose`: Zhu et al. 2023, arXiv:2309.10400, section 3.2, equations 3 and 4. A sequence is N chunks of random lengths;
chunk i has its positions moved up by a skipping bias u_i, drawn evenly from {u_{i-1}, ..., context length − length},
with u_0 = 0. The paper leaves open how the chunks' lengths are drawn; here every way to cut the sequence into N is
equally likely (the authors' code for N = 2 keeps the first chunk to the first half). The text (equation 5) is skipped
along, v_i = u_i, which the paper names as an alternative to biases of the text's own; so text stands at the distances
that its positions say. Here the bias is limited by the document's end (`SourceSequences.skipping_at`), since a document
need only fill a sequence and not the context length.

`randomized`: Ruoss et al. 2023, arXiv:2305.16843, section 3: as many positions of the context length as the sequence
has tokens, drawn without replacement and sorted. Moved so that the first is 0: RoPE sees differences alone, and
transformers takes position 0 for the beginning of a document.
"""

import numpy as np

from ropecli.data.sampling import seeded_generator
from ropecli.errors import RecipeError


def refuse_impossible_positions(kind: str, length: int, context_length: int, chunks: int) -> None:
    """Raises RecipeError where positions of this kind cannot be drawn. length, context_length: tokens."""
    if kind == "full":
        return
    if context_length < length:
        raise RecipeError(
            f"positions: {kind} cannot fit sequences of {length} tokens into {context_length} positions. "
            "Ask for more of them, or for shorter sequences."
        )
    if kind == "pose" and chunks > length:
        raise RecipeError(f"pose_chunks: {chunks} chunks need {chunks} tokens; a sequence has {length}.")


def positions_of(kind: str, length: int, context_length: int, chunks: int, seed: int, at: int) -> np.ndarray:
    """Shape (length,), int64, rising from 0 to at most context_length − 1.

    at: the sequence's position in the stream, so that a sequence has other positions in every epoch.
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
