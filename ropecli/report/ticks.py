"""Round numbers on an axis, logarithmic or not, also where it spans less than a power of ten; and which have room."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

_Tick = TypeVar("_Tick", int, float)
_LADDERS: tuple[tuple[float, ...], ...] = (
    (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 5),
    (1, 3),
    (1,),
)
"""Within a power of ten, from fine to coarse."""
_FEW = 4
"""Fewer round numbers do not show that an axis is logarithmic."""


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Up to `most` ticks from low to high, both above 0; at least one, as near to them as can be."""
    from_power, to_power = math.floor(math.log10(low)), math.floor(math.log10(high))
    for ladder in _LADDERS:
        ticks = [step * 10.0**power for power in range(from_power, to_power + 1) for step in ladder]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) < 2 or (len(inside) < _FEW and high < 10 * low):
            return max(inside, even_numbers(low, high, most), key=len)
        if len(inside) <= most and _has_room(inside, math.log(high / low) / (2 * most)):
            return inside
    every = math.ceil(len(inside) / most)
    return inside[::every]


def _has_room(ticks: list[float], least: float) -> bool:
    return all(math.log(high / low) >= least for low, high in pairwise(ticks))


def even_numbers(low: float, high: float, most: int) -> list[float]:
    """Up to about `most` ticks a round step apart, from low to high; at least one."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    ticks = [round(index * step, 12) for index in range(first, math.floor(high / step) + 1)]
    return ticks or [low]


def with_room(ticks: Sequence[_Tick], place: Callable[[_Tick], float], width: Callable[[_Tick], float]) -> list[_Tick]:
    """Those whose numbers do not touch, powers of two first. width: of a tick's number, in the units of its place."""
    kept: list[_Tick] = []
    for tick in sorted(set(ticks), key=lambda tick: (tick != 0 and math.frexp(tick)[0] != 0.5, tick)):
        if all(abs(place(tick) - place(other)) >= (width(tick) + width(other)) / 2 for other in kept):
            kept.append(tick)
    return sorted(kept)


def share(value: float, low: float, high: float, logarithmic: bool) -> float:
    """From 0 at low to 1 at high; 0 where they are the same."""
    if high <= low:
        return 0.0
    if logarithmic:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)
