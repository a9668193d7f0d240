"""Branches shared by the distance methods: keys inside a window, and keys beyond it."""

from dataclasses import replace

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Branch, PositionMap, Remapping


def near_and_far(window: int, query: PositionMap, key: PositionMap | None) -> tuple[Branch, Branch]:
    """Keys less than `window` tokens back at their true distance; all earlier keys at query(n) - key(m)."""
    near = Branch(lambda n: np.maximum(n - window + 1, 0), lambda n: n + 1)
    far = Branch(np.zeros_like, lambda n: np.maximum(n - window + 1, 0), query, key)
    return near, far


def near_and_first(
    window: int, first: int, query: PositionMap, key: PositionMap | None = None
) -> tuple[Branch, Branch]:
    """The last `window` tokens at their true distance, and the first `first` tokens at query(n) - key(m)."""
    near, far = near_and_far(window, query, key)
    return near, replace(far, stop=lambda n: np.minimum(far.stop(n), first))


def check_window(method: str, name: str, window: int, pretrained: int) -> int:
    """Return `window`, tokens. Raises MethodError if it exceeds the pretraining length."""
    if window > pretrained:
        raise MethodError(
            f"{method}: {name} is {window}; expected at most {pretrained}, the trained context length. The model has "
            "not seen larger distances."
        )
    return window


def sliding(window: int) -> Remapping:
    """Standard attention over the last `window` tokens, including the query's own."""
    return Remapping((Branch(lambda n: np.maximum(n - window + 1, 0), lambda n: n + 1),))
