"""The points that a search of a method's own parameters tries: by the ranges that its parameters declare."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.request import tunable

_DIGITS = 3
"""Significant ones: nobody wants to read more in a config.json."""
_TRIES = 8
"""Draws for each point wanted: some do not fit the geometry."""


def points(geometry: RopeGeometry, method: str, factor: float, count: int, seed: int) -> list[ScalingSpec]:
    """Up to `count`, the method's defaults first where it runs by them, the others evenly spread over the ranges.

    Raises MethodError for a method that changes distances, and where nothing fits the geometry.
    """
    known = tunable(method)
    tried = [make_spec(method, factor)]
    if known.search_ranges:
        tried += [make_spec(method, factor, params) for params in _spread(known.search_ranges, _TRIES * count, seed)]
    fitting: list[ScalingSpec] = []
    refusal: MethodError | None = None
    for spec in tried:
        try:
            scale(geometry, spec)
        except MethodError as error:
            refusal = error
            continue
        fitting.append(spec)
        if len(fitting) == count:
            break
    if not fitting:
        raise MethodError(f"{method} cannot be tuned: {refusal}")
    return fitting


def own_constants(specs: Sequence[ScalingSpec]) -> int:
    """The first that leaves all parameters to its method; 0 where none does, as of abf alone."""
    return next((index for index, spec in enumerate(specs) if not spec.params), 0)


def _spread(ranges: dict[str, Any], count: int, seed: int) -> list[dict[str, float]]:
    """Sobol's points, each range in equal steps of its logarithm."""
    import torch

    drawn = (
        torch.quasirandom.SobolEngine(len(ranges), scramble=True, seed=seed).draw(count, dtype=torch.float64).numpy()
    )
    lows, highs = (np.log([getattr(one, end) for one in ranges.values()]) for end in ("low", "high"))
    values = np.exp(lows + drawn * (highs - lows))
    return [dict(zip(ranges, (float(f"{value:.{_DIGITS}g}") for value in row), strict=True)) for row in values]
