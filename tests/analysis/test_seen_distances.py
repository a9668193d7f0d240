"""Which distances attention sees, by every method, against all of them looked at one by one."""

import numpy as np
import pytest

from ropecli.analysis.score import largest_distance, seen_distances
from ropecli.rope import RopeGeometry
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec

GEOMETRY = RopeGeometry(32, 32, 10_000.0, 64)
REMAPPING = [name for name, method in scaling_methods().items() if method.remaps]


@pytest.mark.parametrize("method", REMAPPING)
@pytest.mark.parametrize("factor", [1.0, 3.3])
def test_they_are_the_last_tokens(method, factor):
    rope, target = scale(GEOMETRY, make_spec(method, factor)), round(64 * factor)
    seen = seen_distances(rope, target)
    rows = rope.remapping.distances(np.arange(target), np.arange(target))
    assert seen.shape == (target,)
    for distance in range(target):
        np.testing.assert_equal(seen[distance], rows[target - 1, target - 1 - distance])
    some = np.array([0, 5, target - 1])
    np.testing.assert_array_equal(seen_distances(rope, target, some), seen[some])


def test_plain_attention_sees_all_as_they_are():
    rope = scale(GEOMETRY, make_spec("yarn", 8.0))
    np.testing.assert_array_equal(seen_distances(rope, 512), np.arange(512))
    assert seen_distances(rope, 10**9, np.array([0, 10**9 - 1])).tolist() == [0, 10**9 - 1]
    assert largest_distance(rope, 10**9) == 10**9 - 1
