"""Search without training: constants of known methods, and longrope's factor for each rotary pair.

`search_constants` tries points in the search ranges of a method's parameters by successive halving: many points on few
documents, then fewer points on more. Source: Jamieson and Talwalkar 2016 (arXiv:1502.07943).

`evolve` is the evolutionary search of LongRoPE: Ding et al. 2024 (arXiv:2402.13753), section 4 and appendix A. Factors
do not decrease from faster to slower pairs, and are between 1 and 1.25·s. The number of initial tokens that stay
unscaled is not searched: config.json cannot express it.

With the objective needle, candidates are those of LongRoPE2: Shang et al. 2025 (arXiv:2502.20082), algorithms 1 and 2.
A candidate has a critical pair. Pairs from there on have factors between s and 2·s; faster ones have NTK's factors for
the base that gives the critical pair its factor. LongRoPE2 reads short texts with the pretrained frequencies. Changing
frequencies with the length breaks KV caches, so here one list of factors serves all lengths.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.method import SearchRange
from ropecli.scaling.registry import find_method
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import ScalingSpec, make_spec

if TYPE_CHECKING:
    from ropecli.tuning.tune_settings import TuneSettings

_DIGITS = 3
"""Significant digits of a constant."""
_DRAWS_PER_POINT = 8
"""Samples per point; some do not fit the geometry."""
_FIRST_ROUND_DOCUMENTS = 2
START_METHODS = ("linear", "ntk", "yarn")
"""Methods that provide the first members of the population."""
_LARGEST_FACTOR = 1.25
_FACTOR_STEP = 0.01
_MUTATED_SHARE = 0.3
"""Fraction of factors that a mutation samples again."""
_CROSSOVER_TRIES = 100
_LARGEST_CRITICAL_FACTOR = 2.0
_MOST_ROTATIONS = 10
"""Rotations within the pretraining length of the fastest pair that may be critical."""
_NEEDLE_DOCUMENTS = 10
Factors = tuple[float, ...]
Candidate = TypeVar("Candidate", bound=Hashable)


class Measure(Protocol):
    """Measures the loss of a scaling on the first `documents` documents."""

    def __call__(self, spec: ScalingSpec, documents: int, iteration: int = 0) -> float: ...


def search_constants(
    geometry: RopeGeometry, factor: float, settings: "TuneSettings", documents: int, measure: Measure
) -> ScalingSpec:
    """Find the best scaling of all methods. Each method gets an equal share of the points, at least one.

    The default constants of the first method are always measured on all documents, so the result is never worse.
    Raises MethodError.
    """
    share = max(1, settings.points // len(settings.methods))
    points = [grid_points(geometry, method, factor, share, settings.seed) for method in settings.methods]
    specs = [spec for of_method in points for spec in of_method]

    @cache
    def loss(index: int, count: int) -> float:
        return measure(specs[index], count)

    best = halve(range(len(specs)), documents, loss)[0]
    return specs[min((best, own_constants(specs)), key=lambda index: loss(index, documents))]


def grid_points(geometry: RopeGeometry, method: str, factor: float, count: int, seed: int) -> list[ScalingSpec]:
    """Return up to `count` points: the method's defaults, if any, then points spread evenly over its search ranges.

    Raises MethodError if none fits the geometry.
    """
    ranges = find_method(method).search_ranges
    tried = [make_spec(method, factor)]
    tried += [make_spec(method, factor, params) for params in _spread(ranges, _DRAWS_PER_POINT * count, seed)]
    fitting: list[ScalingSpec] = []
    refusal: MethodError | None = None
    for spec in tried:
        try:
            scale(geometry, spec)
        except MethodError as error:
            refusal = error
        else:
            fitting.append(spec)
        if len(fitting) == count:
            break
    if not fitting:
        raise MethodError(f"{method} cannot be tuned: {refusal}")
    return fitting


def own_constants(specs: Sequence[ScalingSpec]) -> int:
    """Index of the first spec with default parameters; 0 if there is none, as for only abf."""
    return next((index for index, spec in enumerate(specs) if not spec.params), 0)


def _spread(ranges: dict[str, SearchRange], count: int, seed: int) -> list[dict[str, float]]:
    """Sobol points, uniform in the logarithm of each range."""
    import torch

    if not ranges:
        return []
    sobol = torch.quasirandom.SobolEngine(len(ranges), scramble=True, seed=seed)
    drawn = sobol.draw(count, dtype=torch.float64).numpy()
    lows = np.log([one.low for one in ranges.values()])
    highs = np.log([one.high for one in ranges.values()])
    values = np.exp(lows + drawn * (highs - lows))
    return [dict(zip(ranges, (float(f"{value:.{_DIGITS}g}") for value in row), strict=True)) for row in values]


def rounds(points: int, documents: int) -> list[tuple[int, int]]:
    """(points, documents) of each round: half the points on twice the documents each time, finally on all documents."""
    plan = []
    read = min(_FIRST_ROUND_DOCUMENTS, documents)
    while points > 2 and read < documents:
        plan.append((points, read))
        points, read = (points + 1) // 2, min(2 * read, documents)
    return [*plan, (points, documents)]


def halve(points: Sequence[int], documents: int, loss: Callable[[int, int], float]) -> list[int]:
    """Run all rounds. Returns the points of the last one, best first. loss: takes a point and a document count."""
    left = list(points)
    for count, read in rounds(len(left), documents):
        left = sorted(left[:count], key=lambda point: loss(point, read))
    return left


def evolve(
    geometry: RopeGeometry, factor: float, settings: "TuneSettings", documents: int, measure: Measure
) -> ScalingSpec:
    """Find the best factors, as a longrope scaling.

    Candidates are scored on a few documents. The best one and the known methods are then compared on all documents.
    """
    rng = np.random.default_rng(settings.seed)
    known = known_methods(geometry, factor)
    if settings.objective == "needle":
        best = _evolve_critical(geometry, factor, settings, rng, measure)
    else:
        best = _evolve_all(known, factor, settings, rng, measure)
    finalists = [spec_of(factors, factor) for factors in dict.fromkeys((best, *known))]
    return min(finalists, key=lambda spec: measure(spec, documents, settings.search_iterations))


def _evolve_all(
    known: Sequence[Factors], factor: float, settings: "TuneSettings", rng: np.random.Generator, measure: Measure
) -> Factors:
    """LongRoPE's evolution, of the factors of all pairs."""

    def breed(best: list[Factors]) -> list[Factors]:
        mutants = [mutated(best[rng.integers(len(best))], factor, rng) for _ in range(settings.search_mutations)]
        return [*mutants, *(crossed(best, factor, rng) for _ in range(settings.search_crossovers))]

    def loss(candidate: Factors, iteration: int) -> float:
        return measure(spec_of(candidate, factor), settings.search_documents, iteration)

    return _best_after(settings, first_population(known, factor, settings.search_population, rng), loss, breed)


class Critical(NamedTuple):
    """A candidate of LongRoPE2. pair: index of the critical pair. slow: the factors from there on."""

    pair: int
    slow: Factors

    @property
    def factors(self) -> Factors:
        fast = self.slow[0] ** (np.arange(self.pair) / self.pair)
        return _rounded(np.concatenate([fast, self.slow]))


def _evolve_critical(
    geometry: RopeGeometry, factor: float, settings: "TuneSettings", rng: np.random.Generator, measure: Measure
) -> Factors:
    """LongRoPE2's evolution, of the critical pair and the factors from there on."""

    def breed(best: list[Critical]) -> list[Critical]:
        parents = rng.integers(len(best), size=settings.search_mutations + settings.search_crossovers)
        return [_mutated_critical(best[parent], factor, rng) for parent in parents]

    def loss(candidate: Critical, iteration: int) -> float:
        return measure(spec_of(candidate.factors, factor), _NEEDLE_DOCUMENTS, iteration)

    first = first_critical(geometry, factor, settings.search_population, rng)
    return _best_after(settings, first, loss, breed).factors


def _best_after(
    settings: "TuneSettings",
    candidates: list[Candidate],
    loss: Callable[[Candidate, int], float],
    breed: Callable[[list[Candidate]], list[Candidate]],
) -> Candidate:
    """The best candidate after all iterations. loss: of a candidate, in an iteration. breed: the next generation."""
    losses: dict[Candidate, float] = {}
    for iteration in range(settings.search_iterations + 1):
        for candidate in candidates:
            if candidate not in losses:
                losses[candidate] = loss(candidate, iteration)
        best = sorted(losses, key=lambda one: losses[one])[: settings.search_parents]
        candidates = breed(best)
    return best[0]


def first_critical(geometry: RopeGeometry, factor: float, size: int, rng: np.random.Generator) -> list[Critical]:
    """Each possible critical pair in turn with a random factor, mutated from the second turn on.

    Possible are the pairs from the first with at most ten rotations within the pretraining length to the first with at
    most one.
    """
    rotations = geometry.original_max_position_embeddings * geometry.inv_freq() / (2 * np.pi)
    last = len(rotations) - 1
    first, theoretical = (min(last, int((rotations > most).sum())) for most in (_MOST_ROTATIONS, 1))
    pairs = range(max(1, first), max(1, theoretical) + 1)
    drawn = []
    for index in range(size):
        pair = pairs[index % len(pairs)]
        slow = np.full(len(rotations) - pair, factor * rng.uniform(1, _LARGEST_CRITICAL_FACTOR))
        candidate = Critical(pair, _rounded(slow))
        drawn.append(candidate if index < len(pairs) else _mutated_critical(candidate, factor, rng))
    return drawn


def _mutated_critical(parent: Critical, factor: float, rng: np.random.Generator) -> Critical:
    return parent._replace(slow=_resampled(parent.slow, factor, _LARGEST_CRITICAL_FACTOR * factor, rng))


def spec_of(factors: Factors, factor: float) -> ScalingSpec:
    return make_spec("longrope", factor, {"long_factor": list(factors)})


def known_methods(geometry: RopeGeometry, factor: float) -> list[Factors]:
    """Factors of the known methods in START_METHODS."""
    known = []
    for method in START_METHODS:
        try:
            inv_freq = scale(geometry, make_spec(method, factor)).inv_freq
        except MethodError:  # yarn, if no pair is between its two bounds
            continue
        known.append(_within_bounds(geometry.inv_freq() / inv_freq, factor))
    return known


def first_population(known: Sequence[Factors], factor: float, size: int, rng: np.random.Generator) -> list[Factors]:
    """Up to `size` known factors, then mutations of them."""
    mutants = [mutated(known[index % len(known)], factor, rng) for index in range(size - len(known))]
    return [*known[:size], *mutants]


def _within_bounds(factors: np.ndarray, factor: float) -> Factors:
    """Clip the factors to the bounds, round them, and raise each to at least the one before."""
    return _rounded(np.clip(factors, 1.0, _LARGEST_FACTOR * factor))


def _rounded(factors: np.ndarray) -> Factors:
    stepped = np.round(factors / _FACTOR_STEP) * _FACTOR_STEP
    return tuple(float(f"{value:.2f}") for value in np.maximum.accumulate(stepped))


def mutated(parent: Factors, factor: float, rng: np.random.Generator) -> Factors:
    return _resampled(parent, 1.0, _LARGEST_FACTOR * factor, rng)


def _resampled(parent: Factors, lowest: float, largest: float, rng: np.random.Generator) -> Factors:
    """Sample some factors again, each between its neighbours."""
    child = np.array(parent)
    for place in np.flatnonzero(rng.random(len(child)) < _MUTATED_SHARE):
        low = child[place - 1] if place else lowest
        high = child[place + 1] if place + 1 < len(child) else largest
        child[place] = rng.uniform(low, max(low, high))
    return _rounded(np.clip(child, lowest, largest))


def crossed(parents: Sequence[Factors], factor: float, rng: np.random.Generator) -> Factors:
    """Take each factor from one of two parents, retrying until none decreases; finally, raise those that do."""
    for _ in range(_CROSSOVER_TRIES):
        pair = rng.choice(len(parents), size=2, replace=len(parents) < 2)
        one, other = (np.array(parents[index]) for index in pair)
        child = np.where(rng.random(len(one)) < 0.5, one, other)
        if (np.diff(child) >= 0).all():
            break
    return _within_bounds(child, factor)
