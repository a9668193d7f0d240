"""The evolutionary search for a factor of each pair, for longrope.

Source: Ding et al. 2024, LongRoPE (arXiv:2402.13753), section 4 and appendix A. Factors never fall from a faster pair
to a slower one, and lie between 1 and 1.25·s. Its second search space, how many first tokens stay as they were, is left
out: no config.json can say it.
"""

from collections.abc import Sequence

import numpy as np

from ropecli.checkpoint.patch_plan import PatchPlan
from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import ScalingSpec, make_spec
from ropecli.tuning.run import Run, try_plan

BEGINNINGS = ("linear", "ntk", "yarn")
"""The methods whose factors the first population is made of."""
_FURTHEST = 1.25
_STEP = 0.01
_CHANGED = 0.3
"""The share of its factors that a mutation draws anew."""
_TRIES = 100

Factors = tuple[float, ...]


def evolve(run: Run) -> PatchPlan:
    """The plan of the best factors that were found. The model is left as it was. Raises MethodError, PatchError.

    The evolution reads few documents; all of them decide between its best and the known methods it began with.
    """
    settings, sizes, factor = run.settings, run.settings.evolution, run.factor
    drawing = np.random.default_rng(settings.seed)
    known = _known(settings.geometry(run.checkpoint), factor)
    population = _first(known, factor, sizes.population, drawing)
    measured: dict[Factors, float] = {}
    for iteration in range(sizes.iterations + 1):
        for one in population:
            if one not in measured:
                measured[one] = _measure(run, one, iteration, sizes.documents)
        parents = sorted(measured, key=lambda one: measured[one])[: sizes.parents]
        mutants = [_mutated(parents[drawing.integers(len(parents))], factor, drawing) for _ in range(sizes.mutations)]
        crossed = [_crossed(parents, factor, drawing) for _ in range(sizes.crossovers)]
        population = [*mutants, *crossed]
    count = len(run.judge.documents.kept)
    best = min(dict.fromkeys((parents[0], *known)), key=lambda one: _measure(run, one, sizes.iterations, count))
    return settings.plan(run.checkpoint, _spec(best, factor))


def _spec(factors: Factors, factor: float) -> ScalingSpec:
    return make_spec("longrope", factor, {"long_factor": list(factors)})


def _known(geometry: RopeGeometry, factor: float) -> list[Factors]:
    """The factors of known methods."""
    known = []
    for method in BEGINNINGS:
        try:
            inv_freq = scale(geometry, make_spec(method, factor)).inv_freq
        except MethodError:  # as yarn, where no pair lies between its ends
            continue
        known.append(_allowed(geometry.inv_freq() / inv_freq, factor))
    return known


def _first(known: Sequence[Factors], factor: float, size: int, drawing: np.random.Generator) -> list[Factors]:
    """The known ones, as many as there is room for, and their mutants."""
    return [*known[:size]] + [
        _mutated(known[index % len(known)], factor, drawing) for index in range(max(0, size - len(known)))
    ]


def _allowed(factors: np.ndarray, factor: float) -> Factors:
    """In steps, within the bounds, and never falling."""
    stepped = np.round(np.clip(factors, 1.0, _FURTHEST * factor) / _STEP) * _STEP
    return tuple(float(f"{value:.2f}") for value in np.maximum.accumulate(stepped))


def _mutated(parent: Factors, factor: float, drawing: np.random.Generator) -> Factors:
    """Some factors drawn anew, each between its neighbours."""
    child = np.array(parent)
    for place in np.flatnonzero(drawing.random(len(child)) < _CHANGED):
        low = child[place - 1] if place else 1.0
        high = child[place + 1] if place + 1 < len(child) else _FURTHEST * factor
        child[place] = drawing.uniform(low, max(low, high))
    return _allowed(child, factor)


def _crossed(parents: Sequence[Factors], factor: float, drawing: np.random.Generator) -> Factors:
    """Every factor from one of two parents; drawn again until they never fall, and at last raised where they do."""
    for _ in range(_TRIES):
        pair = drawing.choice(len(parents), size=2, replace=len(parents) < 2)
        one, other = (np.array(parents[index]) for index in pair)
        child = np.where(drawing.random(len(one)) < 0.5, one, other)
        if (np.diff(child) >= 0).all():
            break
    return _allowed(child, factor)


def _measure(run: Run, factors: Factors, iteration: int, count: int) -> float:
    """On so many documents."""
    plan = run.settings.plan(run.checkpoint, _spec(factors, run.factor))
    return try_plan(run, plan, f"search {factors}", count, level="search", step=iteration)
