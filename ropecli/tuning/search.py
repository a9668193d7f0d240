"""The levels that find a scaling without training.

`search_constants`, level `grid`: points in the search ranges of a method's parameters are tried by successive halving:
many points on few documents, then fewer points on more. Source: Jamieson and Talwalkar 2016 (arXiv:1502.07943).

`evolve`, level `search`: longrope's factor for each rotary pair, by the evolutionary search of LongRoPE: Ding et al.
2024 (arXiv:2402.13753), section 4 and appendix A. Factors do not decrease from faster to slower pairs, and are between
1 and 1.25·s. The number of initial tokens that stay unscaled is not searched: config.json cannot express it.
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
MUTATIONS, CROSSOVERS, PARENTS = 16, 16, 32
"""Sizes of a generation, as published (section 4 and appendix A)."""
DOCUMENTS = 4
"""Documents to score each candidate on: our choice."""
START_METHODS = ("linear", "ntk", "yarn")
"""Methods that provide the first members of the population."""
_LARGEST_FACTOR = 1.25
_FACTOR_STEP = 0.01
_MUTATED_SHARE = 0.3
"""Fraction of factors that a mutation samples again."""
_CROSSOVER_TRIES = 100
PairFactors = tuple[float, ...]


def search_constants(
    geometry: RopeGeometry, factor: float, settings: TuneSettings, documents: int, measure: Measure
) -> ScalingSpec:
    """Find the best scaling of all methods. Each method gets an equal share of the points, at least one.

    The default constants of the first method are always measured on all documents, so the result is never worse.
    Raises MethodError.
    """
    share = max(1, settings["points"] // len(settings["methods"]))
    points = [grid_points(geometry, method, factor, share, settings["seed"]) for method in settings["methods"]]
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


def planned_tokens(settings: TuneSettings, documents: int, pretraining: int, target: int) -> tuple[int, int]:
    """About how many tokens the search reads, and how many the training. documents: for scoring."""
    if settings["level"] == "search":
        children = settings["iterations"] * (MUTATIONS + CROSSOVERS)
        few = min(DOCUMENTS, documents)
        reads = (settings["population"] + children) * few + documents * len(START_METHODS)
    else:
        # in each round half of the points, on twice the documents
        reads = round(settings["points"] * np.log2(2 * documents))
    trained = settings["steps"] * settings["batch_size"] * target if settings["level"] == "heads" else 0
    return (reads + documents) * (pretraining + target), trained


def evolve(
    geometry: RopeGeometry, factor: float, settings: TuneSettings, documents: int, measure: Measure
) -> ScalingSpec:
    """Find the best factors, as a longrope scaling.

    Candidates are scored on a few documents. The best one and the known methods are then compared on all documents.
    """
    rng = np.random.default_rng(settings["seed"])
    known = known_methods(geometry, factor)
    candidates = first_population(known, factor, settings["population"], rng)
    losses: dict[PairFactors, float] = {}
    for iteration in range(settings["iterations"] + 1):
        for candidate in candidates:
            if candidate not in losses:
                losses[candidate] = measure(spec_of(candidate, factor), DOCUMENTS, iteration)
        best = sorted(losses, key=lambda candidate: losses[candidate])[:PARENTS]
        candidates = [mutated(best[rng.integers(len(best))], factor, rng) for _ in range(MUTATIONS)]
        candidates += [crossed(best, factor, rng) for _ in range(CROSSOVERS)]
    finalists = [spec_of(factors, factor) for factors in dict.fromkeys((best[0], *known))]
    return min(finalists, key=lambda spec: measure(spec, documents, settings["iterations"]))


def spec_of(factors: PairFactors, factor: float) -> ScalingSpec:
    return make_spec("longrope", factor, {"long_factor": list(factors)})


def known_methods(geometry: RopeGeometry, factor: float) -> list[PairFactors]:
    """Factors of the known methods in START_METHODS."""
    known = []
    for method in START_METHODS:
        try:
            inv_freq = scale(geometry, make_spec(method, factor)).inv_freq
        except MethodError:  # yarn, if no pair is between its two bounds
            continue
        known.append(_within_bounds(geometry.inv_freq() / inv_freq, factor))
    return known


def first_population(
    known: Sequence[PairFactors], factor: float, size: int, rng: np.random.Generator
) -> list[PairFactors]:
    """Up to `size` known factors, then mutations of them."""
    return [*known[:size], *(mutated(known[index % len(known)], factor, rng) for index in range(size - len(known)))]


def mutated(parent: PairFactors, factor: float, rng: np.random.Generator) -> PairFactors:
    """Sample some factors again, each between its neighbours."""
    child = np.array(parent)
    for place in np.flatnonzero(rng.random(len(child)) < _MUTATED_SHARE):
        low = child[place - 1] if place else 1.0
        high = child[place + 1] if place + 1 < len(child) else _LARGEST_FACTOR * factor
        child[place] = rng.uniform(low, max(low, high))
    return _within_bounds(child, factor)


def crossed(parents: Sequence[PairFactors], factor: float, rng: np.random.Generator) -> PairFactors:
    """Take each factor from one of two parents, retrying until none decreases; finally, raise those that do."""
    for _ in range(_CROSSOVER_TRIES):
        pair = rng.choice(len(parents), size=2, replace=len(parents) < 2)
        first, second = (np.array(parents[index]) for index in pair)
        child = np.where(rng.random(len(first)) < 0.5, first, second)
        if (np.diff(child) >= 0).all():
            break
    return _within_bounds(child, factor)


def _within_bounds(factors: np.ndarray, factor: float) -> PairFactors:
    """Clip the factors to the bounds, round them, and raise each to at least the one before."""
    clipped = np.clip(factors, 1.0, _LARGEST_FACTOR * factor)
    stepped = np.round(clipped / _FACTOR_STEP) * _FACTOR_STEP
    return tuple(float(f"{value:.2f}") for value in np.maximum.accumulate(stepped))
