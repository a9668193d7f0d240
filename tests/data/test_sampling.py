"""Random choices: documents of a source, exact shares of the sources, and positions with gaps as in the papers."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropecli.data.sampling import BLOCK, Mixture, positions_of, refuse_impossible_positions, select_documents
from ropecli.errors import RecipeError

LENGTHS = np.random.default_rng(0).integers(1, 200, 4000)
some_lengths = st.lists(st.integers(0, 50), max_size=40).map(lambda lengths: np.array(lengths, dtype=np.int64))


def test_long_documents_are_kept_and_a_share_of_the_short_ones():
    chosen = select_documents(LENGTHS, 1, long_from=100, keep_short=0.3)
    long = np.flatnonzero(LENGTHS >= 100)
    assert set(long) <= set(chosen.documents)
    short = (LENGTHS < 100).sum()
    kept = len(chosen.documents) - len(long)
    assert abs(kept - 0.3 * short) < 4 * np.sqrt(0.3 * 0.7 * short)  # four standard deviations of the draw
    assert chosen.skipped["skipped by keep_short"] == short - kept


@given(some_lengths, st.integers(1, 60), st.integers(1, 400), st.integers(0, 9))
def test_the_budget_is_used_up_and_the_last_document_cut(lengths, least, budget, seed):
    chosen = select_documents(lengths, least, max_tokens=budget, seed=seed)
    assert chosen.lengths.sum() == min(budget, int(lengths[lengths >= least].sum()))
    assert (np.diff(chosen.documents) > 0).all()
    whole = lengths[chosen.documents]
    assert ((chosen.lengths > 0) & (chosen.lengths <= whole)).all()
    assert (chosen.lengths < whole).sum() <= 1
    assert len(chosen.documents) + sum(chosen.skipped.values()) == len(lengths)
    assert chosen.skipped["too short"] == (lengths < least).sum()


@settings(max_examples=20)
@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=6), st.integers(0, 3))
def test_every_block_has_the_shares_and_a_source_gives_its_sequences_in_order(weights, seed):
    mixture = Mixture(weights, seed)
    seen: Counter[int] = Counter()
    for position in range(3 * BLOCK):
        source, index = mixture.at(position)
        assert index == seen[source]
        seen[source] += 1
        if (position + 1) % BLOCK == 0:
            blocks = (position + 1) // BLOCK
            assert [seen[at] for at in range(len(weights))] == [blocks * share for share in mixture.shares]


def test_shares_are_those_of_the_largest_remainder():
    weights = [5.0, 3.0, 2.5, 1.7, 1.0]
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    shares = [int(share) for share in exact]
    for at in sorted(range(5), key=lambda at: shares[at] - exact[at])[: BLOCK - sum(shares)]:
        shares[at] += 1
    assert list(Mixture(weights, 0).shares) == shares


@pytest.mark.parametrize("kind", ["pose", "randomized"])
@given(st.integers(5, 40), st.integers(0, 200), st.integers(2, 4), st.integers(0, 10**6))
def test_positions_rise_from_zero_within_the_context_length(kind, length, more, chunks, at):
    positions = positions_of(kind, length, length + more, chunks, 0, at)
    assert (positions.shape, positions.dtype) == ((length,), np.int64)
    assert 0 == positions[0] <= positions[-1] < length + more
    assert (np.diff(positions) >= 1).all()
    if kind == "pose":
        assert (np.diff(positions) > 1).sum() <= chunks - 1


def test_every_next_bias_is_sampled_from_the_last_one_on():
    """Three chunks: the second bias is uniform from 0 to context length − length, the third from the second on."""
    gaps: Counter[tuple[int, int]] = Counter()
    for at in range(6000):
        positions = positions_of("pose", 3, 5, 3, 0, at)  # chunks of one token
        gaps[int(positions[1]) - 1, int(positions[2]) - 2] += 1
    for second in range(3):
        for third in range(second, 3):
            expected = 6000 / 3 / (3 - second)
            assert abs(gaps[second, third] - expected) < 5 * np.sqrt(expected)


def test_randomized_positions_are_a_sample_without_replacement():
    """2 tokens in a context of 5: distance d has probability (5 − d) / 10."""
    distances = [int(positions_of("randomized", 2, 5, 2, 0, at)[1]) for at in range(10_000)]
    for distance in (1, 2, 3, 4):
        assert abs(distances.count(distance) - 1000 * (5 - distance)) < 200


@pytest.mark.parametrize(
    ("kind", "length", "context", "chunks", "message"),
    [
        ("pose", 64, 48, 2, "pose cannot fit sequences of 64 tokens into 48 positions"),
        ("randomized", 64, 48, 2, "randomized cannot fit sequences of 64 tokens into 48 positions"),
        ("pose", 8, 64, 9, "9 chunks need at least 9 tokens, but a sequence has 8"),
    ],
)
def test_positions_that_do_not_fit_are_refused(kind, length, context, chunks, message):
    with pytest.raises(RecipeError, match=message):
        refuse_impossible_positions(kind, length, context, chunks)
    refuse_impossible_positions(kind, length, max(context, length), min(chunks, length - 1))
