"""What the methods share: the keys nearer than a window, and those beyond it."""

from dataclasses import replace

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import Branch, Positions, Remapping


def near_and_far(window: int, query: Positions, key: Positions | None) -> tuple[Branch, Branch]:
    """Keys less than `window` tokens back as they are; all before those at the distance query(n) - key(m)."""
    near = Branch(lambda n: np.maximum(n - window + 1, 0), lambda n: n + 1)
    far = Branch(np.zeros_like, lambda n: np.maximum(n - window + 1, 0), query, key)
    return near, far


def near_and_first(window: int, first: int, query: Positions, key: Positions | None = None) -> tuple[Branch, Branch]:
    """The last `window` tokens as they are; of those before, the first `first` alone, query(n) - key(m) away."""
    near, far = near_and_far(window, query, key)
    return near, replace(far, stop=lambda n: np.minimum(far.stop(n), first))


def check_window(method: str, name: str, window: int, pretrained: int) -> int:
    """`window`, tokens. Raises MethodError where it is above the pretraining length."""
    if window > pretrained:
        raise MethodError(
            f"{method}: {name} is {window}; it must be at most {pretrained}, the window that the model was trained to "
            "read: distances beyond it are new to the model."
        )
    return window


def sliding(window: int) -> Remapping:
    """Plain attention over the last `window` tokens, the query's own among them."""
    return Remapping((Branch(lambda n: np.maximum(n - window + 1, 0), lambda n: n + 1),))
