"""Sequences of one source: layouts against token-by-token references; tokens, labels, positions, skips and order."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ropecli.data.sampling import positions_of, select_documents
from ropecli.data.sequences import SHORTEST, UNSCORED, SourceSequences, concatenate, cut_long, pack, pieces_of
from ropecli.data.token_store import Shard, TokenStore

LENGTHS = (9, 8, 23, 1, 4, 5, 31, 3)
END = 999_999
lengths_of_documents = st.lists(st.integers(1, 40), max_size=30).map(lambda lengths: np.array(lengths, dtype=np.int64))
lengths_of_sequences = st.integers(2, 17)


def tokens_of(layout):
    """Each sequence as (document, token) pairs."""
    return [
        [(document, token) for document, start, stop in layout.pieces(k) for token in range(start, stop)]
        for k in range(len(layout))
    ]


@given(lengths_of_documents, lengths_of_sequences)
def test_long_cuts_documents_into_consecutive_sequences(lengths, length):
    expected = [
        [(document, start + offset) for offset in range(length)]
        for document, tokens in enumerate(lengths)
        for start in range(0, tokens - length + 1, length)
    ]
    assert tokens_of(cut_long(lengths, length)) == expected


@given(lengths_of_documents, lengths_of_sequences, st.integers(0, 5))
def test_concat_is_one_text_cut_where_a_sequence_is_full(lengths, length, seed):
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    text = [(document, token) for document in order for token in range(lengths[document])]
    expected = [text[start : start + length] for start in range(0, len(text) - length + 1, length)]
    assert tokens_of(concatenate(lengths, length, np.random.default_rng(seed))) == expected


@given(lengths_of_documents, lengths_of_sequences)
def test_packed_has_every_token_once_in_a_best_fit_decreasing_packing(lengths, length):
    turns, counts = np.empty(0, np.int64), np.zeros(len(lengths), np.int64)
    store = TokenStore([Shard(lengths, np.empty(0, np.int32), np.empty(0, bool), turns, counts)])
    chosen = select_documents(lengths, 1)
    sequences = tokens_of(pack(pieces_of(store, chosen, length, cut=False), length))
    expected = [
        (document, token)
        for document, tokens in enumerate(lengths.tolist())
        for token in range(tokens - (tokens % length if tokens % length < SHORTEST else 0))
    ]
    assert sorted(token for sequence in sequences for token in sequence) == expected
    pieces = [length] * int((lengths // length).sum())
    pieces += sorted((rest for rest in (lengths % length).tolist() if rest >= SHORTEST), reverse=True)
    rooms = []
    for piece in pieces:
        fitting = [at for at, room in enumerate(rooms) if room >= piece]
        if fitting:
            rooms[min(fitting, key=lambda at: rooms[at])] -= piece
        else:
            rooms.append(length - piece)
    assert sorted(map(len, sequences)) == sorted(length - room for room in rooms)


def long(store, length=8, **options):
    chosen = select_documents(store.lengths, length)
    return SourceSequences(store, chosen, cut_long(chosen.lengths, length), length, **options)


def packed(store, length=8, **options):
    chosen = select_documents(store.lengths, 2)
    layout = pack(pieces_of(store, chosen, length, cut=False), length)
    return SourceSequences(store, chosen, layout, length, padding=END, packed=True, **options)


def single(store, length=8, **options):
    chosen = select_documents(store.lengths, 2)
    layout = pieces_of(store, chosen, length, cut=False)
    return SourceSequences(store, chosen, layout, length, padding=END, **options)


def concat(store, length=8, **options):
    chosen = select_documents(store.lengths, 1)
    layout = concatenate(chosen.lengths, length, np.random.default_rng(0))
    return SourceSequences(store, chosen, layout, length, **options)


layouts = pytest.mark.parametrize("layout", [long, packed, concat, single], ids=["long", "packed", "concat", "single"])


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(4, 20),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 60)),
)
@example([[3, 5], [3, 5]], 8, True, 14)  # the budget ends within a conversation that fits
def test_a_conversation_that_fits_is_whole_and_a_longer_one_is_cut_between_turns_or_dropped(turns, length, cut, budget):
    """turns: tokens of each. budget: tokens used of all."""
    lengths, starts = np.array([sum(each) for each in turns]), [np.cumsum([0, *each[:-1]]) for each in turns]
    counts = np.array([len(each) for each in turns])
    store = TokenStore([Shard(lengths, np.empty(0, np.int32), np.empty(0, bool), np.concatenate(starts), counts)])
    chosen = select_documents(lengths, 1, max_tokens=budget)
    layout = pieces_of(store, chosen, length, cut=cut)
    pieces = [piece for index in range(len(layout)) for piece in layout.pieces(index)]
    for index, (document, used) in enumerate(zip(chosen.documents.tolist(), chosen.lengths.tolist(), strict=True)):
        spans = [(start, stop) for at, start, stop in pieces if at == index]
        if used == lengths[document] <= length or not cut:
            assert spans == ([(0, used)] if used == lengths[document] <= length else [])
            continue
        borders = [*starts[document].tolist(), int(lengths[document])]
        fitting = [(start, stop) for start, stop in pairwise(borders) if stop <= used and stop - start <= length]
        cut_again = [pairwise([border for border in borders if start <= border <= stop]) for start, stop in spans]
        assert [turn for turns in cut_again for turn in turns] == fitting
        for (start, stop), (following, _) in pairwise(spans):
            turn = next(stop for begin, stop in fitting if begin == following)
            assert stop != following or turn - start > length  # else both would be one piece


def rows_of(part):
    return [part.row(index) for index in range(len(part))]


@layouts
def test_a_label_is_the_next_token_and_packed_labels_end_with_the_document(numbered, layout):
    for row in rows_of(layout(numbered(*LENGTHS))):
        starts = [*np.flatnonzero(row.positions == 0), len(row.ids)] if layout is packed else [0, 8]
        for start, stop in pairwise(starts):
            ids = row.ids[start:stop].tolist()
            assert row.positions[start:stop].tolist() == list(range(len(ids)))
            expected = [*(UNSCORED if label == END else label for label in ids[1:]), UNSCORED]
            assert row.labels[start:stop].tolist() == expected
        assert row.ids.dtype == row.labels.dtype == row.positions.dtype == np.int64


def answers(ids):
    """Few tokens: the first of a document, those on both sides of a border, none of the longest document."""
    return np.isin(ids % 1000, [0, 3, 7, 8, 9]) & (ids < 6000)


@layouts
def test_labels_are_the_tokens_to_train_on_and_sequences_without_any_are_dropped(numbered, layout):
    whole, masked = layout(numbered(*LENGTHS)), layout(numbered(*LENGTHS, trained=answers))
    expected = []
    for row in rows_of(whole):
        labels = [label if label != UNSCORED and answers(label) else UNSCORED for label in row.labels.tolist()]
        if set(labels) != {UNSCORED}:
            expected.append((row.ids.tolist(), labels, row.positions.tolist()))
    rows = [(row.ids.tolist(), row.labels.tolist(), row.positions.tolist()) for row in rows_of(masked)]
    assert rows == expected
    assert masked.dropped == len(whole) - len(expected) > 0
    assert masked.targets.tolist() == [sum(label != UNSCORED for label in labels) for _, labels, _ in expected]
    positions = np.arange(8) * 3  # text with masked tokens does not skip
    for at in range(len(masked)):
        row = masked.skipping_at(at, positions)
        assert (row.ids.tolist(), row.labels.tolist()) == (masked.at(at).ids.tolist(), masked.at(at).labels.tolist())
        np.testing.assert_array_equal(row.positions, positions)


@layouts
@pytest.mark.parametrize("trained", [None, lambda ids: (ids % 1000 > 2) & (ids % 3 > 0)], ids=["text", "conversations"])
def test_the_labels_of_a_document_are_counted_in_all_of_its_pieces(numbered, layout, trained):
    counts = []
    for row in rows_of(layout(numbered(*LENGTHS, trained=trained), by_document=True)):
        scored = row.labels != UNSCORED
        counts += zip(row.labels[scored].tolist(), row.document_labels[scored].tolist(), strict=True)
    owners: list[int] = []
    for label, _ in counts:
        owners.append(label // 1000)
    labels = Counter(owners)
    assert [count for _, count in counts] == [labels[owner] for owner in owners]
    assert max(labels.values()) > 8  # in several sequences


def test_every_epoch_has_every_sequence_once_in_the_order_of_seed_and_epoch(numbered):
    """The order never changes between releases: a permutation by seed and epoch."""
    seed = 2**62
    part = long(numbered(800), seed=seed)
    for epoch in (0, 1, 5):
        ids = [part.at(100 * epoch + index).ids.tolist() for index in range(100)]
        order = np.random.default_rng([seed, epoch]).permutation(100)
        assert ids == [part.row(index).ids.tolist() for index in order]


@pytest.mark.parametrize("layout", [long, concat], ids=["long", "concat"])
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8).filter(lambda lengths: max(lengths) >= 8),
    *(st.integers(0, 60), st.integers(2, 8), st.integers(0, 999)),
)
def test_text_skips_with_the_positions_up_to_the_end_of_its_only_document(numbered, layout, lengths, more, chunks, at):
    """A sequence of several documents does not skip."""
    positions, part = positions_of("pose", 8, 8 + more, chunks, 0, at), layout(numbered(*lengths))
    for at in range(len(part)):
        plain, row = part.at(at), part.skipping_at(at, positions)
        document, start = divmod(int(plain.ids[0]), 1000)
        ids, labels = plain.ids.tolist(), plain.labels.tolist()
        if document < len(lengths) and ids == list(range(1000 * document + start, 1000 * document + start + 8)):
            text = [*range(1000 * document, 1000 * document + lengths[document]), UNSCORED]
            left = lengths[document] - start - 8
            places = [start + token + min(position - token, left) for token, position in enumerate(positions.tolist())]
            ids, labels = [text[place] for place in places], [text[place + 1] for place in places]
        assert (row.ids.tolist(), row.labels.tolist()) == (ids, labels)
        np.testing.assert_array_equal(row.positions, positions)
