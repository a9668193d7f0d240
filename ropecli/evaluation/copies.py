"""Copies in the text itself: scored tokens by whether their context stood earlier, and how far back.

The context of a token is the few tokens before it. The token is *far* if they stood last farther back than the
reference, the base at its own length, can have before it; *near* if they stood last within that; else *ordinary*.
Whether the same token follows again does not decide: a class that asks for it is chosen by the outcome, and flatters a
model that copies too much. It tells right copies from false ones within a class.
"""

import numpy as np

CONTEXT = 4
"""Tokens that must stand earlier."""
CLASSES = {"ordinary": (0,), "near": (1, 2), "far": (3, 4), "near, false": (2,), "far, false": (4,)}
"""The codes of each class. false: another token followed."""
COUNT = 5
"""Number of codes."""


def runs_of(ids: np.ndarray, tokens: int) -> np.ndarray:
    """A hash of each run of `tokens` tokens; shape (len(ids) - tokens + 1,)."""
    powers = np.uint64(0x9E3779B97F4A7C15) ** np.arange(tokens, dtype=np.uint64)
    return np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64) + np.uint64(1), tokens) @ powers


def classes_of(ids: np.ndarray, starts: np.ndarray, reference: int, context: int = CONTEXT) -> np.ndarray:
    """The code of each token, see CLASSES; shape (tokens,), int8.

    ids: of a document, shape (tokens,). starts: the first position that the reader has before each token, shape
    (tokens,). reference: tokens that the reference reads.
    """
    classes = np.zeros(len(ids), dtype=np.int8)
    if len(ids) <= context:
        return classes
    runs = runs_of(ids[:-1], context)
    order = np.argsort(runs, kind="stable")
    again = runs[order[1:]] == runs[order[:-1]]
    last = np.full(len(runs), -1)  # where the same run began last
    last[order[1:][again]] = order[:-1][again]
    tokens = np.arange(context, len(ids))
    repeats = (last >= 0) & (last >= starts[tokens])
    far = repeats & (tokens - last >= reference)
    false = repeats & (ids[np.maximum(last, 0) + context] != ids[tokens])
    classes[tokens] = repeats.astype(np.int8) + 2 * far + false
    return classes
