"""How documents fill sequences: each layout against a token-by-token reference."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ropecli.data.sequence_layouts import SHORTEST, concatenate, cut_long, pack

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


@given(lengths_of_documents, lengths_of_sequences, st.booleans(), st.integers(0, 5))
def test_concat_is_one_text_cut_where_a_sequence_is_full(lengths, length, separated, seed):
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    text = [(document, token) for document in order for token in range(lengths[document] + separated)]
    expected = [text[start : start + length] for start in range(0, len(text) - length + 1, length)]
    assert tokens_of(concatenate(lengths, length, np.random.default_rng(seed), separated=separated)) == expected


@given(lengths_of_documents, lengths_of_sequences)
def test_packed_holds_every_token_once_but_single_ones(lengths, length):
    sequences = tokens_of(pack(lengths, length))
    expected = {
        (document, token)
        for document, tokens in enumerate(lengths.tolist())
        for token in range(tokens - (tokens % length if tokens % length < SHORTEST else 0))
    }
    packed = [token for sequence in sequences for token in sequence]
    assert set(packed) == expected
    assert len(packed) == len(expected)
    assert all(0 < len(sequence) <= length for sequence in sequences)


@given(lengths_of_documents, lengths_of_sequences)
def test_packed_is_best_fit_decreasing(lengths, length):
    """Sequence lengths of a brute-force best-fit packing."""
    pieces = [length] * int((lengths // length).sum())
    pieces += sorted((rest for rest in (lengths % length).tolist() if rest >= SHORTEST), reverse=True)
    rooms = []
    for piece in pieces:
        fitting = [at for at, room in enumerate(rooms) if room >= piece]
        if fitting:
            rooms[min(fitting, key=lambda at: rooms[at])] -= piece
        else:
            rooms.append(length - piece)
    filled = sorted(len(sequence) for sequence in tokens_of(pack(lengths, length)))
    assert filled == sorted(length - room for room in rooms)
