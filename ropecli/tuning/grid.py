"""The level `grid`: constants of known methods, found without training.

Points in the search ranges of a method's parameters are tried by successive halving: many points on few documents, then
fewer points on more. Source: Jamieson and Talwalkar 2016 (arXiv:1502.07943).
"""

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.method import SearchRange
from ropecli.scaling.registry import find_method
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.task import Measure, TuneSettings

_DIGITS = 3
"""Significant digits of a constant."""
_SAMPLES_PER_POINT = 8
"""Some do not fit the geometry."""
_FIRST_ROUND_DOCUMENTS = 2


def search_constants(
    geometry: RopeGeometry, factor: float, settings: TuneSettings, documents: int, measure: Measure
) -> ScalingSpec:
    """Find the best scaling of all methods. Each method gets an equal share of the points, at least one.

    The default constants of the first method are always measured on all documents, so the result is never worse.
    Raises MethodError.
    """
    share = max(1, settings.points // len(settings.methods))
    points = [grid_points(geometry, method, factor, share, settings.seed) for method in settings.methods]
    specs = [spec for method_points in points for spec in method_points]

    @cache
    def loss(index: int, count: int) -> float:
        return measure(specs[index], count, 0)

    finalists = halve(range(len(specs)), documents, loss)[0], first_default(specs)
    return specs[min(finalists, key=lambda index: loss(index, documents))]


def grid_points(geometry: RopeGeometry, method: str, factor: float, count: int, seed: int) -> list[ScalingSpec]:
    """Return up to `count` points: the method's defaults, if any, then points spread evenly over its search ranges.

    Raises MethodError if none fits the geometry.
    """
    ranges = find_method(method).search_ranges
    fitting: list[ScalingSpec] = []
    refusal: MethodError | None = None
    for params in [{}, *_spread(ranges, _SAMPLES_PER_POINT * count, seed)]:
        spec = make_spec(method, factor, params)
        try:
            scale(geometry, spec)
        except MethodError as error:
            refusal = error
        else:
            fitting.append(spec)
    if not fitting:
        raise MethodError(f"{method} cannot be tuned: {refusal}")
    return fitting[:count]


def first_default(specs: Sequence[ScalingSpec]) -> int:
    """Index of the first spec with default parameters; 0 if there is none, as for only abf."""
    return next((index for index, spec in enumerate(specs) if not spec.params), 0)


def _spread(ranges: dict[str, SearchRange], count: int, seed: int) -> list[dict[str, float]]:
    """Sobol points, uniform in the logarithm of each range."""
    if not ranges:
        return []
    sobol = torch.quasirandom.SobolEngine(len(ranges), scramble=True, seed=seed)
    shares = sobol.draw(count, dtype=torch.float64).numpy()
    lows, highs = (np.log([getattr(limits, end) for limits in ranges.values()]) for end in ("low", "high"))
    values = np.exp(lows + shares * (highs - lows))
    return [dict(zip(ranges, (float(f"{value:.{_DIGITS}g}") for value in row), strict=True)) for row in values]


def halve(points: Sequence[int], documents: int, loss: Callable[[int, int], float]) -> list[int]:
    """Keep the better half of the points on twice the documents, until all documents are read.

    Returns the last points, best first. loss: of a point on the first documents, whose number it takes.
    """
    left, read = list(points), min(_FIRST_ROUND_DOCUMENTS, documents)
    while len(left) > 2 and read < documents:
        left = sorted(left, key=lambda point: loss(point, read))[: (len(left) + 1) // 2]
        read = min(2 * read, documents)
    return sorted(left, key=lambda point: loss(point, documents))
