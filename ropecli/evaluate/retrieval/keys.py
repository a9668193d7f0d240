"""Random keys of five digits: those that are hidden, and those that are not, to be told apart from them."""

from collections.abc import Callable

import numpy as np

LOWEST, HIGHEST = 10_000, 99_999
COUNT = HIGHEST - LOWEST + 1
_TRIES = 50


def draw_keys(rng: np.random.Generator, count: int, elsewhere: str, tokens_of: Callable[[str], int]) -> tuple[str, ...]:
    """Different keys, none of which stands in the text `elsewhere`.

    All take as many tokens as the first where the tokenizer has enough such numbers: log-probabilities are then of
    sequences of the same length.
    """
    keys: list[str] = []
    tokens, tries = 0, 0
    while len(keys) < count:
        key = str(rng.integers(LOWEST, HIGHEST + 1))
        tries += 1
        if key in keys or (key in elsewhere and tries < COUNT):
            continue
        if not keys:
            tokens = tokens_of(key)
        if tokens_of(key) == tokens or tries > _TRIES * count:
            keys.append(key)
    return tuple(keys)
