"""Sequences of one source: tokens, labels and positions at the borders; an order that depends only on position."""

from collections import Counter

import numpy as np
import pytest

from ropecli.data.sampling import select_documents
from ropecli.data.sequence_layouts import concatenate, cut_long, pack
from ropecli.data.sequences import UNSCORED, SourceSequences

LENGTHS = (9, 8, 23, 1, 4, 5, 31, 3)
END = 999_999


def long(store, length=8, **options):
    chosen = select_documents(store.lengths, length)
    return SourceSequences(store, chosen, cut_long(chosen.lengths, length), length, **options)


def packed(store, length=8, **options):
    chosen = select_documents(store.lengths, 2)
    return SourceSequences(store, chosen, pack(chosen.lengths, length), length, padding=END, **options)


def concat(store, length=8, separator=END, **options):
    chosen = select_documents(store.lengths, 1)
    draw = np.random.default_rng(0)
    layout = concatenate(chosen.lengths, length, draw, separated=separator is not None)
    return SourceSequences(store, chosen, layout, length, separator=separator, **options)


def all_ids(part):
    return [part.row(index).ids.tolist() for index in range(len(part))]


def epoch(part, number):
    return [part.at(number * len(part) + index).ids.tolist() for index in range(len(part))]


@pytest.mark.parametrize("layout", [long, concat], ids=["long", "concat"])
def test_a_label_is_the_next_token_of_the_sequence(numbered, layout):
    part = layout(numbered(*LENGTHS))
    for index in range(len(part)):
        row = part.row(index)
        assert row.labels.tolist() == [*row.ids[1:].tolist(), UNSCORED]
        assert row.positions.tolist() == list(range(8))
        assert row.ids.dtype == row.labels.dtype == row.positions.dtype == np.int64


def documents_in(row):
    """Split a packed row where positions restart: the tokens of each document."""
    starts = [*np.flatnonzero(row.positions == 0), len(row.ids)]
    return [slice(starts[at], starts[at + 1]) for at in range(len(starts) - 1)]


def test_packed_labels_end_with_the_document(numbered):
    part = packed(numbered(*LENGTHS))
    for row in map(part.row, range(len(part))):
        for piece in documents_in(row):
            ids, labels, positions = row.ids[piece], row.labels[piece], row.positions[piece]
            np.testing.assert_array_equal(positions, np.arange(len(ids)))
            expected = [*ids[1:].tolist(), UNSCORED] if ids[0] != END else [UNSCORED] * len(ids)
            assert labels.tolist() == expected


def answers(ids):
    """Few tokens: the first of a document, those on both sides of a border, none of the longest document."""
    return np.isin(ids % 1000, [0, 3, 7, 8, 9]) & (ids < 6000)


@pytest.mark.parametrize("layout", [long, packed, concat], ids=["long", "packed", "concat"])
def test_labels_are_the_tokens_to_train_on_and_sequences_without_any_are_dropped(numbered, layout):
    whole, masked = layout(numbered(*LENGTHS)), layout(numbered(*LENGTHS, trained=answers))
    expected = []
    for row in map(whole.row, range(len(whole))):
        labels = [label if label != END and answers(label) else UNSCORED for label in row.labels.tolist()]
        if set(labels) != {UNSCORED}:
            expected.append((row.ids.tolist(), labels, row.positions.tolist()))
    found = [masked.row(index) for index in range(len(masked))]
    assert [(row.ids.tolist(), row.labels.tolist(), row.positions.tolist()) for row in found] == expected
    assert masked.dropped == len(whole) - len(expected) > 0
    assert masked.targets.tolist() == [sum(label != UNSCORED for label in labels) for _, labels, _ in expected]
    assert masked.largest_id == whole.largest_id
    positions = np.arange(8) * 3  # text with masked tokens does not skip
    for at in range(len(masked)):
        row = masked.skipping_at(at, positions)
        assert (row.ids.tolist(), row.labels.tolist()) == (masked.at(at).ids.tolist(), masked.at(at).labels.tolist())
        np.testing.assert_array_equal(row.positions, positions)


@pytest.mark.parametrize("layout", [long, packed, concat], ids=["long", "packed", "concat"])
@pytest.mark.parametrize("trained", [None, lambda ids: (ids % 1000 > 2) & (ids % 3 > 0)], ids=["text", "conversations"])
def test_the_labels_of_a_document_are_counted_in_all_of_its_pieces(numbered, layout, trained):
    part = layout(numbered(*LENGTHS, trained=trained), by_document=True)
    found = []
    for row in map(part.row, range(len(part))):
        scored = row.labels != UNSCORED
        found += zip(row.labels[scored].tolist(), row.document_labels[scored].tolist(), strict=True)
    owners: list[int] = []
    for label, _ in found:
        owners.append(owners[-1] if label == END else label // 1000)  # a separator belongs to the document before it
    labels = Counter(owners)
    assert [count for _, count in found] == [labels[owner] for owner in owners]
    assert max(labels.values()) > 8  # in several sequences


def test_text_that_skips_ahead_counts_as_the_labels_of_its_document(numbered):
    part = long(numbered(40, 9), by_document=True)
    counts = {part.skipping_at(at, np.arange(0, 16, 2)).document_labels[-1] for at in range(len(part))}
    assert counts == {35, 7}


@pytest.mark.parametrize("layout", [long, packed, concat], ids=["long", "packed", "concat"])
def test_every_epoch_covers_every_sequence_once(numbered, layout):
    part = layout(numbered(80, 41, 100))
    for number in (0, 1, 7):
        assert sorted(epoch(part, number)) == sorted(all_ids(part))


def test_the_first_source_has_the_order_of_a_source_alone(numbered):
    """The order never changes between releases: a permutation by seed and epoch."""
    seed = 2**62
    part = long(numbered(800), seed=seed)
    for number in (0, 1, 5):
        order = np.random.default_rng([seed, number]).permutation(100)
        assert epoch(part, number) == [all_ids(part)[index] for index in order]
