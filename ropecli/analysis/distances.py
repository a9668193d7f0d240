"""Which distances attention sees: the true ones, or those that a relative-position method puts in their place."""

import numpy as np

from ropecli.scaling.spec import ScaledRope


def seen_distances(rope: ScaledRope, target: int, distances: np.ndarray | None = None) -> np.ndarray:
    """The distance ρ that the last of `target` tokens sees in place of each true one; NaN where that is masked.

    distances: whole ones below target, shape (n,); all of them, from 0 on, unless given.
    """
    true = np.arange(target) if distances is None else distances
    if rope.remapping is None:
        return true.astype(np.float64)
    return rope.remapping.distances(np.array([target - 1]), target - 1 - true)[0]


def largest_distance(rope: ScaledRope, target: int) -> int:
    """The largest ρ that the last of `target` tokens sees: of the first key in one of its branches, in every method.

    In whole tokens, rounded down: L tokens have distances below L. No token before the last sees a larger one.
    """
    if rope.remapping is None:
        return target - 1
    last = np.array([target - 1])
    firsts = [branch.start(last) for branch in rope.remapping.branches if branch.start(last) < branch.stop(last)]
    return int(max(seen_distances(rope, target, last - first).max() for first in firsts))
