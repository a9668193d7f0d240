"""LongRoPE's search: what it may draw, from what it begins, and how many it measures."""

import numpy as np
import pytest

from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec
from ropecli.tuning import search
from ropecli.tuning.task import TuneSettings

GEOMETRY = RopeGeometry(128, 128, 10000.0, 4096)


def sound(factors, factor):
    values = np.array(factors)
    return (
        (np.diff(values) >= 0).all()
        and values[0] >= 1
        and values[-1] <= 1.25 * factor + 1e-9
        and np.allclose(values * 100, np.round(values * 100))
    )


@pytest.mark.parametrize("factor", [1.0, 7.3])
def test_all_that_is_drawn_never_falls_and_keeps_its_bounds(factor):
    drawing = np.random.default_rng(0)
    first = search.first_population(search.known_methods(GEOMETRY, factor), factor, 24, drawing)
    assert len(first) == 24
    everyone = [*first]
    for _ in range(40):
        parents = everyone[-24:]
        everyone += [search.mutated(parents[drawing.integers(24)], factor, drawing) for _ in range(3)]
        everyone += [search.crossed(parents, factor, drawing) for _ in range(3)]
    assert all(sound(one, factor) for one in everyone)
    assert len(set(everyone)) > (20 if factor == 1 else 150)


def test_it_begins_with_interpolation_ntk_and_yarn():
    first = search.first_population(search.known_methods(GEOMETRY, 4.0), 4.0, 64, np.random.default_rng(0))
    assert first[0] == (4.0,) * 64
    for one, method in zip(first[1:3], ("ntk", "yarn"), strict=True):
        known = GEOMETRY.inv_freq() / scale(GEOMETRY, make_spec(method, 4.0)).inv_freq
        np.testing.assert_allclose(one, known, atol=0.0051)


def test_a_child_has_every_factor_from_a_parent():
    drawing = np.random.default_rng(1)
    parents = [(1.0, 2.0, 3.0, 4.0), (1.5, 1.5, 3.5, 3.5)]
    for _ in range(50):
        child = search.crossed(parents, 4.0, drawing)
        assert all(value in pair for value, *pair in zip(child, *parents, strict=True))


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ({"population": 4, "iterations": 2, "mutations": 2, "crossovers": 2, "parents": 8, "documents": 2}, 12),
        ({"population": 3, "iterations": 1, "mutations": 0, "crossovers": 0, "documents": 1}, 3),
    ],
)
def test_it_finds_the_best_that_it_measured(llama, make_run, sizes, most):
    points, settings = [], {f"search_{name}": value for name, value in sizes.items()}
    tuned = (run := make_run(llama, level="search", **settings, on_point=points.append)).tune()
    searched, last = (
        [point for point in points if (point.score.documents == sizes["documents"]) == few] for few in (True, False)
    )
    assert 0 < len(searched) <= most
    assert len({str(point.params) for point in searched}) == len(searched)
    assert {point.step for point in searched} <= set(range(sizes["iterations"] + 1))
    best, decided = (min(some, key=lambda point: point.score.objective) for some in (searched, last))
    # on all three documents, the best of the few and the three known methods, whatever became of them
    assert {point.score.documents for point in last} == {3}
    assert len(last) in (3, 4)
    assert str(best.params) in {str(point.params) for point in last}
    assert tuned.plan.spec.params == decided.params
    rope = tuned.plan.ropes[None]
    assert sound(rope.spec.params["long_factor"], 2.0)
    assert rope.spec.params["short_factor"] == rope.spec.params["long_factor"]
    assert run.model.model.rotary_emb.inv_freq[1] == pytest.approx(rope.inv_freq[1])
    assert make_run(llama, level="search", **settings).tune().plan.spec == tuned.plan.spec


def test_what_is_best_on_few_documents_alone_is_not_chosen(llama, make_run):
    geometry = make_run(llama).task.geometry
    known = search.known_methods(geometry, 2.0)

    def measure(spec, documents, iteration=0):
        """On two documents the known methods are the worst, on all three the best."""
        return 1.0 if (tuple(spec.params["long_factor"]) in known) == (documents == 3) else 2.0

    settings = TuneSettings(level="search", search_population=8, search_iterations=1, search_documents=2)
    found = search.evolve(geometry, 2.0, settings, 3, measure)
    assert tuple(found.params["long_factor"]) in known


def test_longrope2_scales_fast_pairs_by_ntk_up_to_the_critical_one():
    """Its algorithm 1, computed from its formulas; Phi-3-mini has the critical pairs that the paper names."""
    phi = RopeGeometry(96, 96, 10000.0, 2048)
    first = search.first_critical(phi, 4.0, 64, np.random.default_rng(0))
    pairs = {one.pair for one in first}
    tenth, theoretical = (int(np.ceil(48 * np.log(2048 / (2 * np.pi * n)) / np.log(10000))) for n in (10, 1))
    assert theoretical == 31
    assert pairs == set(range(tenth, theoretical + 1))
    assert len(first) == 64
    for one in first:
        factors = np.array(one.factors)
        assert (np.diff(factors) >= 0).all()
        assert ((factors[one.pair :] >= 4) & (factors[one.pair :] <= 8)).all()
        base = (factors[one.pair] * 10000 ** (2 * one.pair / 96)) ** (96 / (2 * one.pair))
        ntk = (base / 10000) ** (2 * np.arange(one.pair) / 96)
        np.testing.assert_allclose(factors[: one.pair], ntk, atol=0.0051)
    assert len(set(first)) > 50


def test_longrope2_finds_the_critical_pair_that_is_best():
    """The loss is least at the critical pair 20 with all slow factors at 6."""
    geometry = RopeGeometry(96, 96, 10000.0, 2048)
    best = np.array(search.Critical(20, (6.0,) * 28).factors)

    def measure(spec, documents, iteration=0):
        return float(np.abs(np.array(spec.params["long_factor"]) - best).mean())

    found = [
        search.evolve(geometry, 4.0, TuneSettings(objective=objective, search_iterations=10), 16, measure)
        for objective in ("needle", "ppl")
    ]
    losses = [measure(spec, 16) for spec in found]
    assert losses[0] < 0.5
    assert losses[0] < losses[1]
