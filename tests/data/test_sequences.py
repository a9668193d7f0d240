"""Training sequences: cut without overlap inside documents, in an order that the position alone decides."""

import numpy as np
import pytest

from ropecli.data.documents import Document, Documents
from ropecli.data.sequences import Sequences


def numbered(*lengths):
    """Documents whose every token is unique: document d, token t is d * 1000 + t."""
    kept = [Document(str(index), index * 1000 + np.arange(length)) for index, length in enumerate(lengths)]
    return Documents(tuple(kept), too_short=0)


def epoch(sequences, number):
    size = len(sequences)
    return sequences.batch(range(number * size, (number + 1) * size))


@pytest.mark.parametrize("lengths", [(8,), (9, 8, 23), (16, 31, 8)])
def test_sequences_are_the_documents_cut_without_overlap(lengths):
    sequences = Sequences(numbered(*lengths), 8, seed=0)
    expected = [
        [document * 1000 + start + offset for offset in range(8)]
        for document, length in enumerate(lengths)
        for start in range(0, length - 7, 8)
    ]
    assert sorted(epoch(sequences, 0).tolist()) == expected
    assert sequences.dropped_tokens == sum(length % 8 for length in lengths)


@pytest.mark.parametrize("number", [0, 1, 7])
def test_every_epoch_covers_every_sequence_once(number):
    sequences = Sequences(numbered(80, 41, 100), 8, seed=3)
    assert sorted(epoch(sequences, number).tolist()) == sorted(epoch(sequences, 0).tolist())
    assert len({tuple(row) for row in epoch(sequences, number)}) == len(sequences)


def test_every_epoch_has_an_order_of_its_own():
    sequences = Sequences(numbered(800), 8, seed=0)
    orders = [epoch(sequences, number).tolist() for number in range(4)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_the_seed_decides_the_order():
    documents = numbered(800)
    np.testing.assert_array_equal(epoch(Sequences(documents, 8, seed=1), 0), epoch(Sequences(documents, 8, seed=1), 0))
    assert (epoch(Sequences(documents, 8, seed=1), 0) != epoch(Sequences(documents, 8, seed=2), 0)).any()


def test_the_position_alone_decides_the_sequence():
    documents = numbered(80, 41, 100)
    read_in_order = Sequences(documents, 8, seed=0)
    in_order = [read_in_order.at(position).tolist() for position in range(60)]
    jumping = Sequences(documents, 8, seed=0)  # as a resumed run does
    for position in (59, 3, 27, 28, 0, 31):
        assert jumping.at(position).tolist() == in_order[position]


def test_a_batch_stacks_its_positions_across_epochs():
    sequences = Sequences(numbered(80), 8, seed=0)
    batch = sequences.batch(range(7, 13))
    assert batch.shape == (6, 8)
    assert batch.dtype == np.int64
    np.testing.assert_array_equal(batch, [sequences.at(position) for position in range(7, 13)])
