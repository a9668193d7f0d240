"""What is said of a source's documents: which count as cut, and fractions that are small."""

import re

import numpy as np

from ropecli.data.layouts import concatenate, cut_long, pack
from ropecli.data.selection import select
from ropecli.data.sequences import SourceSequences
from ropecli.data.wording import sentence


def said_of(store, layout, length, **selection):
    chosen = select(store.lengths, 1, **selection)
    part = SourceSequences(store, chosen, layout(chosen.lengths, length), length, separator=9)
    return sentence("texts", part, "long", None)


def in_order(lengths, length):
    """`concat`, of documents that the draw leaves in their order."""
    seed = next(
        seed for seed in range(99) if (np.diff(np.random.default_rng(seed).permutation(len(lengths))) > 0).all()
    )
    return concatenate(lengths, length, np.random.default_rng(seed), separated=True)


def test_a_document_is_cut_that_no_sequence_holds_whole(numbered):
    for lengths, layout, cut in [
        ((8, 8), cut_long, None),
        ((8, 16), cut_long, "50.0%"),  # in two sequences, though every token is used
        ((8, 3, 5), pack, None),
        ((8, 9, 5, 3), pack, "25.0%"),
        ((8, 7), in_order, None),  # the end that separates them begins the second sequence
        ((9, 6), in_order, "50.0%"),
    ]:
        found = re.search(r"([\d.]+%) of those used are cut", said_of(numbered(*lengths), layout, 8))
        assert (found and found[1]) == cut


def test_a_document_that_the_budget_ends_is_cut(numbered):
    assert "100.0% of those used are cut" in said_of(numbered(16), pack, 16, max_tokens=8)


def test_what_is_little_is_not_nothing(numbered):
    lengths = [8] * 999 + [9]
    store = numbered(*lengths, per_row=50)
    assert "; under 0.1% of their tokens fill no sequence." in said_of(store, cut_long, 8)
    assert "fill no sequence" not in said_of(numbered(*[8] * 1000), cut_long, 8)
