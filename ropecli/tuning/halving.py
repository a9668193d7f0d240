"""Successive halving: many points on few documents, fewer points on more. Knows nothing of what a point is.

Source: Jamieson and Talwalkar 2016 (arXiv:1502.07943).
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
_FIRST = 2
"""Documents of the first round."""


def rounds(points: int, documents: int) -> list[tuple[int, int]]:
    """(points, documents) of each round: every one halves the points and doubles the documents; the last reads all."""
    plan = []
    read = min(_FIRST, documents)
    while points > 2 and read < documents:
        plan.append((points, read))
        points, read = (points + 1) // 2, min(2 * read, documents)
    return [*plan, (points, documents)]


def halve(points: Sequence[T], documents: int, measure: Callable[[T, int], float]) -> list[T]:
    """The points of the last round, best first. measure: of a point on so many documents, the smaller the better."""
    left = list(points)
    for count, read in rounds(len(left), documents):
        left = sorted(left[:count], key=lambda point: measure(point, read))
    return left
