"""Sequences of one source: tokens, labels and positions at the borders; an order that the position alone decides."""

import numpy as np
import pytest

from ropecli.data.layouts import concatenate, cut_long, pack
from ropecli.data.selection import select
from ropecli.data.sequences import UNSCORED, SourceSequences

LENGTHS = (9, 8, 23, 1, 4, 5, 31, 3)
END = 999_999


def long(store, length=8, **options):
    chosen = select(store.lengths, length)
    return SourceSequences(store, chosen, cut_long(chosen.lengths, length), length, **options)


def packed(store, length=8, **options):
    chosen = select(store.lengths, 2)
    return SourceSequences(store, chosen, pack(chosen.lengths, length), length, padding=END, **options)


def concat(store, length=8, separator=END):
    chosen = select(store.lengths, 1)
    draw = np.random.default_rng(0)
    layout = concatenate(chosen.lengths, length, draw, separated=separator is not None)
    return SourceSequences(store, chosen, layout, length, separator=separator)


def all_ids(part):
    return [part.row(index).ids.tolist() for index in range(len(part))]


def epoch(part, number):
    return [part.at(number * len(part) + index).ids.tolist() for index in range(len(part))]


def test_long_sequences_are_the_documents_cut_without_overlap(numbered):
    expected = [
        [document * 1000 + start + offset for offset in range(8)]
        for document, length in enumerate(LENGTHS)
        for start in range(0, length - 7, 8)
    ]
    assert all_ids(long(numbered(*LENGTHS))) == expected


@pytest.mark.parametrize("layout", [long, concat], ids=["long", "concat"])
def test_a_label_is_the_next_token_of_the_sequence(numbered, layout):
    part = layout(numbered(*LENGTHS))
    for index in range(len(part)):
        row = part.row(index)
        assert row.labels.tolist() == [*row.ids[1:].tolist(), UNSCORED]
        assert row.positions.tolist() == list(range(8))
        assert row.ids.dtype == row.labels.dtype == row.positions.dtype == np.int64


@pytest.mark.parametrize("separator", [END, None])
def test_concat_is_all_documents_with_their_separators(numbered, separator):
    text = [token for row in all_ids(concat(numbered(*LENGTHS), separator=separator)) for token in row]
    ends = [] if separator is None else [END]
    order = np.random.default_rng(0).permutation(len(LENGTHS))
    expected = [token for at in order for token in [*(at * 1000 + np.arange(LENGTHS[at])), *ends]]
    assert text == expected[: len(expected) // 8 * 8]
    assert len(expected) - len(text) < 8


def documents_in(row):
    """Where the positions begin again: the tokens of each document of a packed row."""
    starts = [*np.flatnonzero(row.positions == 0), len(row.ids)]
    return [slice(starts[at], starts[at + 1]) for at in range(len(starts) - 1)]


def test_packed_rows_give_the_documents_back(numbered):
    part = packed(numbered(*LENGTHS))
    pieces = [row.ids[piece] for row in map(part.row, range(len(part))) for piece in documents_in(row)]
    pieces = sorted(piece.tolist() for piece in pieces if piece[0] != END)
    whole = [[document * 1000 + token for token in range(length)] for document, length in enumerate(LENGTHS)]
    # 9 and 1 leave a single token, which has nothing to predict
    expected = [ids[start : start + 8] for ids in whole for start in range(0, len(ids), 8)]
    assert pieces == [ids for ids in expected if len(ids) > 1]


def test_packed_labels_end_with_the_document(numbered):
    part = packed(numbered(*LENGTHS))
    for row in map(part.row, range(len(part))):
        for piece in documents_in(row):
            ids, labels, positions = row.ids[piece], row.labels[piece], row.positions[piece]
            np.testing.assert_array_equal(positions, np.arange(len(ids)))
            expected = [*ids[1:].tolist(), UNSCORED] if ids[0] != END else [UNSCORED] * len(ids)
            assert labels.tolist() == expected


@pytest.mark.parametrize("layout", [long, packed, concat], ids=["long", "packed", "concat"])
def test_every_epoch_covers_every_sequence_once(numbered, layout):
    part = layout(numbered(80, 41, 100))
    for number in (0, 1, 7):
        assert sorted(epoch(part, number)) == sorted(all_ids(part))


def test_the_first_source_has_the_order_of_a_source_alone(numbered):
    """As it has been since the first runs: a permutation by the seed and the epoch."""
    seed = 2**62
    part = long(numbered(800), seed=seed)
    for number in (0, 1, 5):
        order = np.random.default_rng([seed, number]).permutation(100)
        assert epoch(part, number) == [all_ids(part)[index] for index in order]


def test_sources_of_one_mixture_have_orders_of_their_own(numbered):
    store = numbered(800)
    assert epoch(long(store, number=1), 0) != epoch(long(store, number=0), 0) != epoch(long(store, number=2), 0)
    assert epoch(long(store, number=1), 0) == epoch(long(store, number=1), 0)


def test_the_position_alone_decides_the_sequence(numbered):
    store = numbered(80, 41, 100)
    read_in_order = long(store)
    in_order = [read_in_order.at(position).ids.tolist() for position in range(60)]
    jumping = long(store)  # as a resumed run does
    for position in (59, 3, 27, 28, 0, 31):
        assert jumping.at(position).ids.tolist() == in_order[position]


def test_a_budget_ends_inside_a_document(numbered):
    store = numbered(40, 40)
    chosen = select(store.lengths, 8, max_tokens=60)
    part = SourceSequences(store, chosen, cut_long(chosen.lengths, 8), 8)
    cut = int(chosen.documents[chosen.lengths < 40][0])
    tokens = [token for row in all_ids(part) for token in row]
    assert sum(token // 1000 == cut for token in tokens) == 16  # of 20 tokens, in eights
    assert len(tokens) == 56
