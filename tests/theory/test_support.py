"""How long a context a rope supports, against the scores themselves."""

import numpy as np
import pytest

from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import scale
from ropecli.theory.support import support_of

DEMO = RopeGeometry(32, 32, 1e4, 256)


def lowest(rope, length: int) -> float:
    """The lowest score at distances up to `length`."""
    return float(np.cos(np.multiply.outer(np.arange(length + 1), rope.inv_freq)).sum(axis=1).min())


@pytest.mark.parametrize("method", ["none", "linear", "ntk", "yarn"])
def test_no_score_is_negative_as_far_as_is_supported_and_the_next_is(method):
    rope = scale(DEMO, ScalingSpec(method, 8.0))
    found = support_of(rope, 2048, 2048)
    assert lowest(rope, found.supported) >= 0 > lowest(rope, found.supported + 1)
    assert found.needed == 2048
    assert found.falls_short == (found.supported < 2048)


def test_pairs_that_stand_still_support_everything():
    found = support_of(scale(DEMO, ScalingSpec("nope", 8.0)), 2048, 4096)
    assert (found.supported, found.falls_short, found.smallest_base) == (None, False, None)


def test_a_remapping_needs_the_distances_that_it_leaves():
    rope = scale(DEMO, ScalingSpec("rerope", 8.0, {"window": 100}))
    assert support_of(rope, 2048, 4096).needed == 100
