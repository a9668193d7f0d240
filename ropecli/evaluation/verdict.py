"""The verdict on what was measured: certainly worse, level, the cheapest of those, and few.

Tables, the page and `extend` share it. Paired 95% intervals decide. Those of few samples are too narrow to decide.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from ropecli.evaluation.report import Change

ENOUGH = 8
"""Documents or prompts; fewer are few."""
_AS_GOOD = 1e-5
"""Relative difference of equal perplexities; the precision of float32."""
_Model = TypeVar("_Model")


def are_few(samples: int) -> bool:
    return samples < ENOUGH


def certain_sign(change: Change | None, samples: int) -> int | None:
    """1 or -1 for a change that is certainly above or below 0, and 0 for level; None if nobody knows."""
    if change is None or change.low is None or change.high is None or are_few(samples):
        return None
    return (change.low > _AS_GOOD) - (change.high < -_AS_GOOD)


def level(ranked: Sequence[_Model], is_worse: Callable[[_Model, _Model], bool | None]) -> list[_Model]:
    """The best model, and those that are not certainly worse. ranked: best first."""
    return [model for model in ranked if model is ranked[0] or not is_worse(model, ranked[0])]


def decide(
    ranked: Sequence[_Model],
    samples: int,
    is_worse: Callable[[_Model, _Model], bool | None],
    costs_more: Callable[[_Model, _Model], bool],
) -> list[_Model]:
    """The winner, and those that may be as good: all of few samples, else the cheapest of those that are level.

    ranked: best first. samples: of the best.
    """
    if are_few(samples):
        return list(ranked)
    equal = level(ranked, is_worse)
    return [model for model in equal if not any(costs_more(model, other) for other in equal)]
