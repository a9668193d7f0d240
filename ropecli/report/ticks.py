"""Round numbers on a logarithmic axis, also where it spans less than a power of ten."""

import math
from itertools import pairwise

_LADDERS: tuple[tuple[float, ...], ...] = (
    (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
    (1, 1.5, 2, 3, 5, 7),
    (1, 2, 5),
    (1, 3),
    (1,),
)
"""Within a power of ten, from fine to coarse."""


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Up to `most` ticks from low to high, both above 0; at least one, as near to them as can be."""
    from_power, to_power = math.floor(math.log10(low)), math.floor(math.log10(high))
    for ladder in _LADDERS:
        ticks = [step * 10.0**power for power in range(from_power, to_power + 1) for step in ladder]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) < 2:
            return even_numbers(low, high, most)
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
