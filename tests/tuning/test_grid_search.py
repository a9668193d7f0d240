"""The points of a search over constants, and the rounds in which they are halved."""

import numpy as np
import pytest

from ropecli.errors import MethodError
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import find_method
from ropecli.scaling.scale import scale
from ropecli.tuning.search import grid_points, halve, rounds, search_constants
from ropecli.tuning.task import TuneSettings

GEOMETRY = RopeGeometry(64, 64, 10000.0, 2048)


@pytest.mark.parametrize("method", ["yarn", "abf", "yarn+resonance"])
def test_points_lie_in_their_ranges_evenly_in_the_logarithm(method):
    found = grid_points(GEOMETRY, method, 4.0, 65, 0)
    own = [spec for spec in found if not spec.params]
    assert len(found) == 65
    assert len(own) == (0 if method == "abf" else 1)  # which has no constant of its own
    assert own == found[: len(own)]
    tried = found[len(own) :]
    assert len({str(spec.params) for spec in tried}) == len(tried)
    for name, known in find_method(method).search_ranges.items():
        values = np.array([spec.params[name] for spec in tried])
        assert (values >= known.low * 0.995).all()
        assert (values <= known.high * 1.005).all()
        quarters = np.histogram(np.log(values), np.linspace(np.log(known.low), np.log(known.high), 5))[0]
        assert quarters.min() >= 12


def test_the_seed_decides():
    one, same, other = (grid_points(GEOMETRY, "yarn", 4.0, 9, seed) for seed in (0, 0, 1))
    assert one == same
    assert one[0] == other[0]
    assert one[1:] != other[1:]


def test_points_that_do_not_fit_are_left_out_and_a_method_that_never_does_is_refused():
    quick = RopeGeometry(8, 8, 10.0, 5650)  # its slowest pair makes 28 rotations: nothing lies below a beta_fast of 9
    found = grid_points(quick, "yarn", 4.0, 12, 0)
    assert len(found) == 12
    for spec in found:
        scale(quick, spec)
    everywhere = [spec.params["beta_fast"] for spec in grid_points(GEOMETRY, "yarn", 4.0, 12, 0)[1:]]
    assert min(everywhere) < 9 < min(spec.params["beta_fast"] for spec in found[1:])
    with pytest.raises(MethodError, match="custom cannot be tuned: custom requires a list, either inv_freq or factors"):
        grid_points(GEOMETRY, "custom", 4.0, 9, 0)
    with pytest.raises(MethodError, match="yarn cannot be tuned: Every pair rotates more than beta_fast times"):
        grid_points(RopeGeometry(8, 8, 10.0, 10**6), "yarn", 4.0, 9, 0)


def test_every_round_halves_the_points_and_doubles_the_documents():
    assert rounds(24, 16) == [(24, 2), (12, 4), (6, 8), (3, 16)]
    assert rounds(5, 16) == [(5, 2), (3, 4), (2, 16)]
    assert rounds(40, 3) == [(40, 2), (20, 3)]
    assert rounds(2, 16) == [(2, 16)]
    assert rounds(1, 1) == [(1, 1)]


def test_halving_reads_less_than_everything_and_finds_the_best():
    """A thing's own number is its quality; few documents blur it a little."""
    read = {}

    def measure(point, documents):
        read[point, documents] = documents
        return point + (0.4 if point % 2 else -0.4) / documents

    found = halve([7, 3, 11, 0, 5, 9, 1, 8, 14, 2, 15, 13, 4, 10, 6, 12], 16, measure)
    assert found[0] == 0
    assert found == sorted(found)
    assert sum(read.values()) == 16 * 2 + 8 * 4 + 4 * 8 + 2 * 16  # where all of each would be 256


def test_a_methods_own_constants_are_measured_to_the_end():
    """On two documents they are the worst, on all three the best."""
    measured = []

    def measure(spec, documents, iteration=0):
        measured.append((str(spec), documents))
        return 1.0 if spec.params else 9.0 if documents == 2 else 0.5

    settings = TuneSettings(points=8)
    assert search_constants(GEOMETRY, 2.0, settings, 3, measure).params == {}
    assert len(measured) == len(set(measured)) == 8 + 4 + 1
