"""Searches parameters by forward passes alone: constants of known methods, and longrope's factor of each pair.

`search_constants` tries points of the ranges that a method's parameters declare, by successive halving: many points on
few documents, fewer points on more. Source: Jamieson and Talwalkar 2016 (arXiv:1502.07943).

`evolve` is the evolutionary search of LongRoPE: Ding et al. 2024 (arXiv:2402.13753), section 4 and appendix A. Factors
never fall from a faster pair to a slower one, and lie between 1 and 1.25·s. Its second search space, how many first
tokens stay as they were, is left out: no config.json can say it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np

from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.tuning_run import TuningRun, try_plan
from ropecli.tuning.tuning_settings import tunable

_DIGITS = 3
"""Significant digits of a constant: nobody wants to read more in a config.json."""
_DRAWS_PER_POINT = 8
"""Draws for each point wanted: some do not fit the geometry."""
_FIRST_ROUND_DOCUMENTS = 2
"""Documents of the first round."""
START_METHODS = ("linear", "ntk", "yarn")
"""The methods whose factors the first population is made of."""
_LARGEST_FACTOR = 1.25
_FACTOR_STEP = 0.01
_MUTATED_SHARE = 0.3
"""The share of its factors that a mutation draws anew."""
_CROSSOVER_TRIES = 100
T = TypeVar("T")
Factors = tuple[float, ...]


def search_constants(run: TuningRun) -> PatchPlan:
    """The plan with the best score, of all methods, each with its share of the points; the model stays as it was.

    The first constants that are a method's own are measured on all documents whatever becomes of them: what the others
    are held against. Raises MethodError, PatchError.
    """
    settings, geometry = run.settings, run.settings.geometry(run.checkpoint)
    share = settings.points // len(settings.methods)
    specs = [spec for one in settings.methods for spec in grid_points(geometry, one, run.factor, share, settings.seed)]
    plans = [settings.plan(run.checkpoint, spec) for spec in specs]

    @cache
    def measure(index: int, count: int) -> float:
        return try_plan(run, plans[index], f"grid {specs[index]}", count, level="grid")

    count = len(run.evaluator.documents.kept)
    best = halve(range(len(plans)), count, measure)[0]
    return plans[min((best, own_constants(specs)), key=lambda index: measure(index, count))]


def grid_points(geometry: RopeGeometry, method: str, factor: float, count: int, seed: int) -> list[ScalingSpec]:
    """Up to `count`, the method's defaults first where it runs by them, the others evenly spread over the ranges.

    Raises MethodError for a method that changes distances, and where nothing fits the geometry.
    """
    known = tunable(method)
    tried = [make_spec(method, factor)]
    if known.search_ranges:
        tried += [
            make_spec(method, factor, params) for params in _spread(known.search_ranges, _DRAWS_PER_POINT * count, seed)
        ]
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


def rounds(points: int, documents: int) -> list[tuple[int, int]]:
    """(points, documents) of each round: every one halves the points and doubles the documents; the last reads all."""
    plan = []
    read = min(_FIRST_ROUND_DOCUMENTS, documents)
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


def evolve(run: TuningRun) -> PatchPlan:
    """The plan of the best factors that were found. The model is left as it was. Raises MethodError, PatchError.

    The evolution reads few documents; all of them decide between its best and the known methods it began with.
    """
    settings, sizes, factor = run.settings, run.settings.evolution, run.factor
    rng = np.random.default_rng(settings.seed)
    known = _known_methods(settings.geometry(run.checkpoint), factor)
    population = _first_population(known, factor, sizes.population, rng)
    measured: dict[Factors, float] = {}
    for iteration in range(sizes.iterations + 1):
        for one in population:
            if one not in measured:
                measured[one] = _measure(run, one, iteration, sizes.documents)
        parents = sorted(measured, key=lambda one: measured[one])[: sizes.parents]
        mutants = [_mutated(parents[rng.integers(len(parents))], factor, rng) for _ in range(sizes.mutations)]
        crossed = [_crossed(parents, factor, rng) for _ in range(sizes.crossovers)]
        population = [*mutants, *crossed]
    count = len(run.evaluator.documents.kept)
    best = min(dict.fromkeys((parents[0], *known)), key=lambda one: _measure(run, one, sizes.iterations, count))
    return settings.plan(run.checkpoint, _spec(best, factor))


def _spec(factors: Factors, factor: float) -> ScalingSpec:
    return make_spec("longrope", factor, {"long_factor": list(factors)})


def _known_methods(geometry: RopeGeometry, factor: float) -> list[Factors]:
    """The factors of known methods."""
    known = []
    for method in START_METHODS:
        try:
            inv_freq = scale(geometry, make_spec(method, factor)).inv_freq
        except MethodError:  # as yarn, where no pair lies between its ends
            continue
        known.append(_within_bounds(geometry.inv_freq() / inv_freq, factor))
    return known


def _first_population(known: Sequence[Factors], factor: float, size: int, rng: np.random.Generator) -> list[Factors]:
    """The known ones, as many as there is room for, and their mutants."""
    return [*known[:size]] + [
        _mutated(known[index % len(known)], factor, rng) for index in range(max(0, size - len(known)))
    ]


def _within_bounds(factors: np.ndarray, factor: float) -> Factors:
    """In steps, within the bounds, and never falling."""
    stepped = np.round(np.clip(factors, 1.0, _LARGEST_FACTOR * factor) / _FACTOR_STEP) * _FACTOR_STEP
    return tuple(float(f"{value:.2f}") for value in np.maximum.accumulate(stepped))


def _mutated(parent: Factors, factor: float, rng: np.random.Generator) -> Factors:
    """Some factors drawn anew, each between its neighbours."""
    child = np.array(parent)
    for place in np.flatnonzero(rng.random(len(child)) < _MUTATED_SHARE):
        low = child[place - 1] if place else 1.0
        high = child[place + 1] if place + 1 < len(child) else _LARGEST_FACTOR * factor
        child[place] = rng.uniform(low, max(low, high))
    return _within_bounds(child, factor)


def _crossed(parents: Sequence[Factors], factor: float, rng: np.random.Generator) -> Factors:
    """Every factor from one of two parents; drawn again until they never fall, and at last raised where they do."""
    for _ in range(_CROSSOVER_TRIES):
        pair = rng.choice(len(parents), size=2, replace=len(parents) < 2)
        one, other = (np.array(parents[index]) for index in pair)
        child = np.where(rng.random(len(one)) < 0.5, one, other)
        if (np.diff(child) >= 0).all():
            break
    return _within_bounds(child, factor)


def _measure(run: TuningRun, factors: Factors, iteration: int, count: int) -> float:
    """On so many documents."""
    plan = run.settings.plan(run.checkpoint, _spec(factors, run.factor))
    return try_plan(run, plan, f"search {factors}", count, level="search", step=iteration)
