"""Which distances the methods give: by their papers' formulas, by the papers' own figures, and what holds of all."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_distances import OF_SCORES, distances

from ropecli.analysis.score import largest_distance
from ropecli.errors import MethodError
from ropecli.rope import Remapping, RopeGeometry
from ropecli.scaling.registry import scaling_methods
from ropecli.scaling.spec import make_spec, remapping_of, scale

NAN = np.nan
METHODS = [name for name, method in scaling_methods().items() if method.remaps]
REACHING = [name for name in METHODS if scaling_methods()[name].uses_factor]


def remapping_for(method: str, pretrained: int, target: int, **params: object) -> Remapping:
    return remapping_of(make_spec(method, 1.0, params), pretrained, target)


def table(remapping: Remapping, tokens: int) -> np.ndarray:
    at = np.arange(tokens)
    return remapping.distances(at, at)


def test_the_figure_of_self_extend():
    """Figure 3 of Jin et al.: ten tokens, a model trained on 7, neighbour window 4, group 2."""
    expected = [
        [0],
        [1, 0],
        [2, 1, 0],
        [3, 2, 1, 0],
        [4, 3, 2, 1, 0],
        [4, 4, 3, 2, 1, 0],
        [5, 5, 4, 3, 2, 1, 0],
        [5, 5, 4, 4, 3, 2, 1, 0],
        [6, 6, 5, 5, 4, 3, 2, 1, 0],
        [6, 6, 5, 5, 4, 4, 3, 2, 1, 0],
    ]
    rows = table(remapping_for("self-extend", 7, 10, window=4, group=2), 10)
    assert [row[: n + 1].tolist() for n, row in enumerate(rows)] == expected


def test_the_figure_of_dual_chunk():
    """Figure 2 of An et al.: twelve tokens, a model trained on 10, blocks of 6, local window 4.

    There queries of later chunks end at position 9; the authors' code, which is kept to here, lets them end at 10.
    """
    expected = [
        [0],
        [1, 0],
        [2, 1, 0],
        [3, 2, 1, 0],
        [4, 3, 2, 1, 0],
        [5, 4, 3, 2, 1, 0],
        [6, 5, 4, 3, 2, 1, 0],
        [7, 6, 5, 4, 3, 2, 1, 0],
        [8, 7, 6, 5, 4, 3, 2, 1, 0],
        [9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
        [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0],
        [10, 9, 8, 7, 6, 5, 5, 4, 3, 2, 1, 0],
    ]
    rows = table(remapping_for("dual-chunk", 10, 12, chunk=10, local_window=4), 13)
    assert [row[: n + 1].tolist() for n, row in enumerate(rows[:12])] == expected
    assert rows[12].tolist() == [10, 9, 8, 7, 6, 5, 6, 5, 4, 3, 2, 1, 0], "the first block is two back now"


def test_the_figure_of_streaming():
    """Figure 4 of Xiao et al.: four sinks and the last four of ten tokens are at 0 to 7 in the cache."""
    rows = table(remapping_for("streaming", 8, 64, window=4, sinks=4), 10)[9]
    np.testing.assert_array_equal(rows, [7, 6, 5, 4, NAN, NAN, 3, 2, 1, 0])


DEFAULTS = {
    ("rerope", 256, 2048): {"window": 128},
    ("leaky-rerope", 256, 2048): {"window": 128, "slope": 15.0},
    # 64 + 1984/group < 128: a group above 31
    ("self-extend", 256, 2048): {"window": 64, "group": 32},
    ("self-extend", 256, 256): {"window": 64, "group": 1},
    ("jet-long", 256, 2048): {"window": 64},
    ("lm-infinite", 256, 2048): {"window": 256, "global_tokens": 10},
    ("streaming", 256, 2048): {"window": 252, "sinks": 4},
    ("dual-chunk", 256, 2048): {"chunk": 192, "local_window": 32},
    # the authors' code: (0.1·ln 2 + 1)² of all scores, as cos and sin are multiplied in queries and keys
    ("string", 4096, 4096): {"shift": 1365, "local_window": 128, "score_factor": pytest.approx(1.1434339)},
}


def test_default_parameters():
    assert {arguments: remapping_for(*arguments).params for arguments in DEFAULTS} == DEFAULTS


windows = st.integers(1, 80)
few = settings(max_examples=15, deadline=None)


@st.composite
def any_remapping(draw, method: str) -> tuple[str, Remapping]:
    """The method with any parameters that it takes."""
    pretrained = draw(windows)
    target = pretrained + draw(st.integers(0, 200))
    if method not in REACHING:
        target = pretrained
    names = draw(st.sets(st.sampled_from(sorted(scaling_methods()[method].signature.keys() - OF_SCORES))))
    params = {name: draw(windows) for name in names}
    try:
        return method, remapping_for(method, pretrained, target, **params)
    except MethodError as error:
        message = str(error)
    assert message.startswith(f"{method}: ")
    assert any(f"{name} is " in message for name in scaling_methods()[method].signature)
    return "rerope", remapping_for("rerope", pretrained, target)


@few
@given(data=st.data())
@pytest.mark.parametrize("method", METHODS)
def test_every_query_sees_known_distances_by_the_papers_formulas(method, data):
    method, remapping = data.draw(any_remapping(method))
    at = np.arange(remapping.target)
    counts = np.zeros((at.size, at.size), dtype=int)
    for branch in remapping.branches:
        start, stop = branch.start(at), branch.stop(at)
        assert start.dtype.kind == stop.dtype.kind == "i"
        assert (np.diff(start) >= 0).all()
        assert (np.diff(stop) >= 0).all()
        assert (start >= 0).all()
        assert (stop <= at + 1).all(), "no query sees a later key"
        counts += (at >= start[:, None]) & (at < stop[:, None])
    assert counts.max() == 1, "no key is seen twice"
    rows = remapping.distances(at, at)
    np.testing.assert_array_equal(np.isnan(rows), counts == 0)
    assert (np.diagonal(rows) == 0).all()
    assert np.nanmin(rows) >= 0
    assert np.nanmax(rows) <= remapping.pretrained + 1e-9
    assert largest_distance(SimpleNamespace(remapping=remapping), at.size) == int(np.nanmax(rows))
    expected = distances(method, at.size, dict(remapping.params), remapping.pretrained)
    np.testing.assert_allclose(rows, expected, atol=1e-9)


REFUSED = [
    ("rerope", {"window": 65}, "rerope: window is 65; expected at most 64, the trained context length"),
    ("leaky-rerope", {"window": 64}, "slope is 1 and window 64; expected a smaller window"),
    ("leaky-rerope", {"slope": 6.9}, "slope is 6.9 and window 32; expected a slope of at least 7"),
    ("self-extend", {"group": 4}, "group is 4; expected at least 5 with"),
    ("streaming", {"window": 61}, "streaming: window is 61; expected at most 60 with 4 sinks"),
    ("dual-chunk", {"chunk": 20, "local_window": 11}, "expected at most 10, half of chunk"),
    ("string", {}, "distances at 256 tokens reach 244, beyond the trained context length, 64. Extend"),
]


@pytest.mark.parametrize(("method", "params", "expected"), REFUSED)
def test_parameters_beyond_the_trained_length_are_refused(method, params, expected):
    with pytest.raises(MethodError) as caught:
        scale(RopeGeometry(32, 32, 1e4, 64), make_spec(method, 4, params))
    assert expected in str(caught.value)
