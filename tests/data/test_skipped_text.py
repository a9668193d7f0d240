"""PoSE's text skips like its positions, up to the document's end; every label is the next token of the text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropecli.data.gapped_positions import positions_of
from ropecli.data.sampling import select_documents
from ropecli.data.sequence_layouts import concatenate, cut_long
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
