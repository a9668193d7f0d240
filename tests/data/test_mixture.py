"""Shares of the sources: exact in every block, by the position alone."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ropecli.data.sampling import BLOCK, Mixture


def test_every_block_holds_the_shares_exactly():
    mixture = Mixture([0.6, 0.3, 0.1], seed=0)
    for block in (0, 1, 77):
        sources = Counter(mixture.at(position)[0] for position in range(block * BLOCK, (block + 1) * BLOCK))
        assert sources == {0: 600, 1: 300, 2: 100}


@settings(max_examples=20)
@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=6), st.integers(0, 3))
def test_a_source_gives_its_sequences_one_after_the_other(weights, seed):
    mixture = Mixture(weights, seed)
    seen = [0] * len(weights)
    for position in range(3 * BLOCK):
        source, index = mixture.at(position)
        assert index == seen[source]
        seen[source] += 1


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=50))
def test_shares_are_whole_and_near_the_weights(weights):
    shares = Mixture(weights, 0).shares
    assert sum(shares) == BLOCK
    assert min(shares) >= 1
    exact = np.array(weights) / sum(weights) * BLOCK
    if exact.min() >= 1:
        assert (np.abs(np.array(shares) - exact) < 1).all()


def test_shares_are_those_of_the_largest_remainder():
    weights = [5.0, 3.0, 2.5, 1.7, 1.0]
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    shares = [int(share) for share in exact]
    for at in sorted(range(5), key=lambda at: shares[at] - exact[at])[: BLOCK - sum(shares)]:
        shares[at] += 1
    assert list(Mixture(weights, 0).shares) == shares


def test_the_position_alone_decides():
    in_order = [Mixture([2, 1], seed=4).at(position) for position in range(4000)]
    jumping = Mixture([2, 1], seed=4)
    for position in np.random.default_rng(0).permutation(4000)[:200].tolist():
        assert jumping.at(position) == in_order[position]
