"""The levels `grid` and `search`: which points are tried, and that the best of them is found."""

import numpy as np
import pytest

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method
from ropecli.tuning import search
from ropecli.tuning.search import grid_points, halve, search_constants
from ropecli.tuning.task import TuneSettings

GEOMETRY = RopeGeometry(128, 128, 10000.0, 4096)


@pytest.mark.parametrize("method", ["yarn", "abf", "yarn+resonance"])
def test_grid_points_fill_their_ranges_evenly_in_the_logarithm(method):
    points = grid_points(GEOMETRY, method, 4.0, 65, 0)
    defaults = [spec for spec in points if not spec.params]
    assert len(points) == 65
    assert defaults == points[: 0 if method == "abf" else 1]  # abf has no default
    for name, limits in find_method(method).search_ranges.items():
        values = np.array([spec.params[name] for spec in points[len(defaults) :]])
        assert len(set(values)) > 30
        assert limits.low * 0.995 <= values.min() <= values.max() <= limits.high * 1.005
        quarters = np.histogram(np.log(values), np.linspace(np.log(limits.low), np.log(limits.high), 5))[0]
        assert quarters.min() >= 12
    other = grid_points(GEOMETRY, method, 4.0, 65, 1)
    assert points == grid_points(GEOMETRY, method, 4.0, 65, 0) != other


def test_grid_points_that_do_not_fit_the_geometry_are_skipped():
    quick = RopeGeometry(8, 8, 10.0, 5650)  # the slowest pair makes 28 rotations: a beta_fast below 9 has no pair
    points = grid_points(quick, "yarn", 4.0, 12, 0)
    assert len(points) == 12
    assert min(spec.params["beta_fast"] for spec in points[1:]) > 9
    with pytest.raises(MethodError, match="yarn cannot be tuned: No pair rotates between beta_slow"):
        grid_points(RopeGeometry(8, 8, 10.0, 10**6), "yarn", 4.0, 9, 0)


def test_halving_reads_few_documents_of_most_points_and_finds_the_best():
    """The loss of a point is its number, blurred by few documents."""
    read = []

    def loss(point, documents):
        read.append((point, documents))
        return point + (0.4 if point % 2 else -0.4) / documents

    last = halve([7, 3, 11, 0, 5, 9, 1, 8, 14, 2, 15, 13, 4, 10, 6, 12], 16, loss)
    assert last == [0, 1]
    counts = [documents for _, documents in read]
    assert {count: counts.count(count) for count in counts} == {2: 16, 4: 8, 8: 4, 16: 2}


def test_default_constants_are_measured_on_all_documents(options_of):
    """They are the worst on two documents, and the best on all three."""
    measured = []

    def measure(spec, documents, iteration):
        measured.append((str(spec), documents))
        return 1.0 if spec.params else 9.0 if documents == 2 else 0.5

    assert search_constants(GEOMETRY, 2.0, options_of(TuneSettings, points=8), 3, measure).params == {}
    assert len(measured) == len(set(measured)) == 8 + 4 + 1


def is_sound(factors, factor):
    values = np.array(factors)
    return (
        (np.diff(values) >= 0).all()
        and values[0] >= 1
        and values[-1] <= 1.25 * factor + 1e-9
        and np.allclose(values * 100, np.round(values * 100))
    )


@pytest.mark.parametrize("factor", [1.0, 7.3])
def test_factors_never_decrease_and_keep_their_bounds(factor):
    rng = np.random.default_rng(0)
    population = search.first_population(search.known_methods(GEOMETRY, factor), factor, 24, rng)
    assert len(population) == 24
    assert population[0] == (factor,) * 64  # linear
    for _ in range(40):
        parents = population[-24:]
        population += [search.mutated(parents[rng.integers(24)], factor, rng) for _ in range(3)]
        population += [search.crossed(parents, factor, rng) for _ in range(3)]
    assert all(is_sound(factors, factor) for factors in population)
    assert len(set(population)) > (20 if factor == 1 else 150)


def test_known_methods_are_compared_on_all_documents(options_of, monkeypatch):
    """They are the worst on two documents, and the best on all three."""
    known = search.known_methods(GEOMETRY, 2.0)

    def measure(spec, documents, iteration):
        return 1.0 if (tuple(spec.params["long_factor"]) in known) == (documents == 3) else 2.0

    monkeypatch.setattr(search, "DOCUMENTS", 2)
    settings = options_of(TuneSettings, level="search", population=8, iterations=1)
    assert tuple(search.evolve(GEOMETRY, 2.0, settings, 3, measure).params["long_factor"]) in known
