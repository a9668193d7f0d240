"""Positions with gaps: increasing from 0, within the context length, and distributed as in the papers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropecli.data.gapped_positions import positions_of, refuse_impossible_positions
from ropecli.errors import RecipeError

both = pytest.mark.parametrize("kind", ["pose", "randomized"])


@both
@given(st.integers(4, 40), st.integers(0, 200), st.integers(2, 4), st.integers(0, 10**6))
def test_positions_rise_from_zero_and_stay_in_the_context_length(kind, length, more, chunks, at):
    positions = positions_of(kind, length, length + more, chunks, 0, at)
    assert positions.shape == (length,)
    assert positions.dtype == np.int64
    assert positions[0] == 0
    assert positions[-1] < length + more
    assert (np.diff(positions) >= 1).all()
    if kind == "pose":
        assert (np.diff(positions) > 1).sum() <= chunks - 1


def test_every_next_bias_is_drawn_from_the_last_one_on():
    """Three chunks: the second bias is uniform from 0 to context length − length, the third from the second on."""
    gaps = []
    for at in range(6000):
        positions = positions_of("pose", 3, 5, 3, 0, at)  # chunks of one token
        gaps.append((int(positions[1]) - 1, int(positions[2]) - 2))
    for second in range(3):
        for third in range(second, 3):
            expected = 6000 / 3 / (3 - second)
            assert abs(gaps.count((second, third)) - expected) < 5 * np.sqrt(expected)


def test_randomized_positions_are_a_sample_without_replacement():
    """2 tokens in a context of 5: distance d has probability (5 − d) / 10."""
    distances = [int(positions_of("randomized", 2, 5, 2, 0, at)[1]) for at in range(10_000)]
    for distance in (1, 2, 3, 4):
        assert abs(distances.count(distance) - 1000 * (5 - distance)) < 200


@both
def test_a_context_shorter_than_the_sequence_is_refused(kind):
    with pytest.raises(RecipeError, match=rf"{kind} cannot fit sequences of 64 tokens into 48 positions"):
        refuse_impossible_positions(kind, 64, 48, 2)
    refuse_impossible_positions(kind, 64, 64, 2)
    refuse_impossible_positions("full", 64, 48, 2)


def test_more_chunks_than_tokens_are_refused():
    with pytest.raises(RecipeError, match="9 chunks need at least 9 tokens, but a sequence has 8"):
        refuse_impossible_positions("pose", 8, 64, 9)
    refuse_impossible_positions("pose", 8, 64, 8)
    np.testing.assert_array_equal(np.diff(positions_of("pose", 8, 8, 8, 0, 0)), 1)
