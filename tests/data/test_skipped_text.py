"""PoSE's text skips like its positions, up to the document's end; every label is the next token of the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropecli.data.gapped_positions import positions_of
from ropecli.data.sampling import select_documents
from ropecli.data.sequence_layouts import concatenate, cut_long, pack
from ropecli.data.sequences import UNSCORED, SourceSequences

END = 999_999
documents = st.lists(st.integers(1, 60), min_size=1, max_size=8).filter(lambda lengths: max(lengths) >= 8)


def long(store, length=8, **budget):
    chosen = select_documents(store.lengths, length, **budget)
    return SourceSequences(store, chosen, cut_long(chosen.lengths, length), length)


def concat(store, separator, length=8):
    chosen = select_documents(store.lengths, 1)
    layout = concatenate(chosen.lengths, length, np.random.default_rng(0), separated=separator is not None)
    return SourceSequences(store, chosen, layout, length, separator=separator)


def skipped(start, text, positions):
    """Token-by-token reference. start: where the sequence begins in `text`, its document."""
    length = len(positions)
    left = len(text) - start - length
    ids, labels = [], []
    for token, position in enumerate(positions):
        at = start + token + min(position - token, left)
        ids.append(text[at])
        labels.append(text[at + 1] if at + 1 < len(text) else UNSCORED)
    return ids, labels


def check(part, positions, texts):
    """Check every sequence of `part` at these positions; return how many skip text."""
    skipping = 0
    for at in range(len(part)):
        plain, row = part.at(at), part.skipping_at(at, positions)
        document, start = divmod(int(plain.ids[0]), 1000)
        text = texts.get(document, ())
        if text[start : start + part.length] == plain.ids.tolist():
            ids, labels = skipped(start, text, positions.tolist())
            skipping += ids != plain.ids.tolist()
        else:  # several documents, or one and what separates it from the next
            ids, labels = plain.ids.tolist(), plain.labels.tolist()
        assert (row.ids.tolist(), row.labels.tolist()) == (ids, labels)
        np.testing.assert_array_equal(row.positions, positions)
        assert row.ids.dtype == row.labels.dtype == np.int64
    return skipping


def halves(bias):
    """Eight positions, the last four shifted."""
    return np.array([0, 1, 2, 3, *(np.arange(4, 8) + bias)])


def texts_of(lengths):
    return {document: [document * 1000 + token for token in range(tokens)] for document, tokens in enumerate(lengths)}


@given(documents, st.integers(0, 60), st.integers(2, 8), st.integers(0, 999))
def test_text_skips_with_the_positions_as_far_as_its_document_reaches(numbered, lengths, more, chunks, at):
    positions = positions_of("pose", 8, 8 + more, chunks, 0, at)
    check(long(numbered(*lengths)), positions, texts_of(lengths))


@pytest.mark.parametrize("separator", [None, END])
@given(documents, st.integers(0, 999))
def test_a_sequence_of_several_documents_or_with_a_separator_is_not_skipped(numbered, separator, lengths, at):
    check(concat(numbered(*lengths), separator), positions_of("pose", 8, 40, 2, 0, at), texts_of(lengths))


def test_the_last_label_is_unscored_at_the_documents_end_alone(numbered):
    part = long(numbered(21))  # sequences at 0 and 8, five tokens left
    rows = {int(row.ids[0]): row for row in (part.skipping_at(at, halves(9)) for at in (0, 1))}
    assert rows[0].ids.tolist() == [0, 1, 2, 3, 13, 14, 15, 16]
    assert rows[0].labels.tolist() == [1, 2, 3, 4, 14, 15, 16, 17]
    assert rows[8].ids.tolist() == [8, 9, 10, 11, 17, 18, 19, 20]
    assert rows[8].labels.tolist() == [9, 10, 11, 12, 18, 19, 20, UNSCORED]


def test_what_is_padded_is_not_skipped(numbered):
    store = numbered(5)
    chosen = select_documents(store.lengths, 2)
    part = SourceSequences(store, chosen, pack(chosen.lengths, 8), 8, padding=END)
    row = part.skipping_at(0, np.arange(8) * 3)
    assert row.ids.tolist() == [0, 1, 2, 3, 4, END, END, END]
    assert row.labels.tolist() == [1, 2, 3, 4] + [UNSCORED] * 4


@pytest.mark.parametrize("sequences", ["long", "concat"])
def test_a_stream_skips_its_text_with_pose_alone(stream_of, source, corpus, sequences):
    plain, randomized, pose = (
        stream_of(source(corpus, sequences=sequences), positions=kind, window=200).batch(range(40))
        for kind in ("full", "randomized", "pose")
    )
    np.testing.assert_array_equal(randomized.ids, plain.ids)
    np.testing.assert_array_equal(randomized.labels, plain.labels)
    np.testing.assert_array_equal(pose.ids[:, 0], plain.ids[:, 0])
    moved = (pose.ids != plain.ids).any(axis=1)
    assert moved.mean() > 0.5
    for row in np.flatnonzero(moved):
        assert 0 < (pose.positions[row] != np.arange(16)).argmax() <= (pose.ids[row] != plain.ids[row]).argmax()
