"""Which documents are used (all long ones, some short ones, up to a budget), and exact shares of the sources."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ropecli.data.sampling import BLOCK, Mixture, select_documents

LENGTHS = np.random.default_rng(0).integers(1, 200, 4000)
some_lengths = st.lists(st.integers(0, 50), max_size=40).map(lambda lengths: np.array(lengths, dtype=np.int64))


def test_long_documents_are_kept_and_of_short_ones_the_share():
    chosen = select_documents(LENGTHS, 1, long_from=100, keep_short=0.3)
    long = np.flatnonzero(LENGTHS >= 100)
    assert set(long) <= set(chosen.documents)
    short = (LENGTHS < 100).sum()
    kept = len(chosen.documents) - len(long)
    assert abs(kept - 0.3 * short) < 4 * np.sqrt(0.3 * 0.7 * short)  # four standard deviations of the draw
    assert chosen.not_drawn == short - kept


def test_whether_a_document_is_kept_hangs_on_itself_alone():
    """A kept short document stays kept with more documents and another length limit."""
    before = select_documents(LENGTHS[:1000], 1, long_from=100, keep_short=0.3)
    after = select_documents(LENGTHS, 1, long_from=150, keep_short=0.3)
    kept_short = before.documents[LENGTHS[before.documents] < 100]
    assert set(kept_short) <= set(after.documents)


def test_the_seed_and_the_source_decide_the_draw():
    for asked in ({"long_from": 100, "keep_short": 0.3}, {"max_tokens": 20_000}):

        def drawn(asked=asked, **keys):
            return set(select_documents(LENGTHS, 1, **asked, **keys).documents.tolist())

        assert drawn(seed=1) == drawn(seed=1)
        assert drawn(seed=1) != drawn(seed=2)
        assert drawn(seed=1) != drawn(seed=1, source=1)


@given(some_lengths, st.integers(1, 60), st.integers(1, 400), st.integers(0, 9))
def test_the_budget_is_used_up_and_the_last_document_cut(lengths, least, budget, seed):
    chosen = select_documents(lengths, least, max_tokens=budget, seed=seed)
    there = int(lengths[lengths >= least].sum())
    assert chosen.lengths.sum() == min(budget, there)
    assert (np.diff(chosen.documents) > 0).all()
    whole = lengths[chosen.documents]
    assert (chosen.lengths <= whole).all()
    assert (chosen.lengths < whole).sum() == chosen.cut <= 1
    assert (chosen.lengths > 0).all()
    assert len(chosen.documents) + chosen.too_short + chosen.over_budget == len(lengths)
    assert chosen.too_short == (lengths < least).sum()


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


def test_shares_are_those_of_the_largest_remainder():
    weights = [5.0, 3.0, 2.5, 1.7, 1.0]
    exact = [weight / sum(weights) * BLOCK for weight in weights]
    shares = [int(share) for share in exact]
    for at in sorted(range(5), key=lambda at: shares[at] - exact[at])[: BLOCK - sum(shares)]:
        shares[at] += 1
    assert list(Mixture(weights, 0).shares) == shares
