"""Random keys of five digits: those that are hidden, and those that are not, to be told apart from them."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from functools import cache
from itertools import chain, islice

import numpy as np

from ropecli.errors import DataError

LOWEST, HIGHEST = 10_000, 99_999
COUNT = HIGHEST - LOWEST + 1
_SAMPLE = 32
"""Keys whose forms are compared, to find the commonest."""
_TRIES = 10_000
"""Keys looked at for that form, before others are taken."""
_NUMBER = re.compile("(?=([1-9][0-9]{4}))")


def numbers_in(text: str) -> set[str]:
    """All keys that stand anywhere in the text, as parts of longer numbers too."""
    return set(_NUMBER.findall(text))


def draw_keys(rng: np.random.Generator, taken: set[str], form_of: Callable[[str], Hashable]) -> Iterator[str]:
    """Different keys, none of them `taken`, in an order that does not depend on how many are drawn.

    form_of: what is to be alike in all, as the number of tokens: log-probabilities are then of sequences of the same
    length. The commonest form comes first, and others where the tokenizer has not enough numbers of that form. Raises
    DataError once no number is left.
    """
    form_of = cache(form_of)
    free = (key for key in map(str, (LOWEST + rng.permutation(COUNT)).tolist()) if key not in taken)
    sample = list(islice(free, _SAMPLE))
    common = Counter(map(form_of, sample)).most_common(1)[0][0] if sample else None
    others = []
    for key in chain(sample, islice(free, _TRIES)):
        if form_of(key) == common:
            yield key
        else:
            others.append(key)
    yield from others
    yield from free
    raise DataError(
        f"Too few numbers of five digits are free for keys: {len(taken)} of {COUNT} stand in the text that is to hide "
        "them. Give another --data, shorter --lengths or fewer --candidates."
    )
