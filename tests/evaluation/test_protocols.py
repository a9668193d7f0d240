"""The windows of each protocol, as numbers alone: against its source, from which they are written a second time here.

`sliding` gives, per window, the ids that the model reads and those that are scored: the last id that it reads predicts
the last scored one.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropecli.data.documents import Document, SpecialTokens
from ropecli.errors import DataError
from ropecli.evaluation.protocols import SAME_TOKENS, Protocol
from ropecli.options import PROTOCOLS

Windows = Iterator[tuple[list[int], list[int]]]


def sliding(ids: Sequence[int], prefix: Sequence[int], length: int, stride: int) -> Windows:
    """Token by token: each is scored in the first window that holds it, windows beginning at 0, stride, 2 stride, …

    Of the first window not what begins every text, nor a token that has nothing before it.
    """
    by_start: dict[int, list[int]] = {}
    for index in range(max(1, len(prefix)), len(ids)):
        start = 0
        while start + length <= index:
            start += stride
        by_start.setdefault(start, []).append(index)
    for start, scored in by_start.items():
        begun = list(prefix) if start else list(ids[: len(prefix)])
        yield [*begun, *ids[start + len(prefix) : scored[-1]]], [ids[index] for index in scored]


BOS = 1
PREFIXES = [(), (BOS,), (BOS, 7), (7, 8, BOS)]
specials = st.sampled_from(PREFIXES).map(lambda prefix: SpecialTokens(prefix))


NONE = SpecialTokens()


def document(tokens, special=NONE):
    """Its text tokens are all different, so that a window tells where it lies."""
    text = 1000 + np.arange(tokens - len(special.prefix))
    return Document("numbered", np.array([*special.prefix, *text], dtype=np.int64))


def windows_of(protocol, special, tokens, length, longest=None):
    longest = longest or length
    resolved = protocol.for_lengths(sorted({length, longest}), special)
    return list(resolved.windows(document(tokens, special), special, length, longest))


def read_and_scored(window):
    """As py gives them: the last token is read or not, and tells nothing of the targets either way."""
    ids = window.ids.tolist()
    return ids[:-1], ids[len(ids) - window.targets :]


@st.composite
def sliding_cases(draw):
    special = draw(specials)
    length = draw(st.integers(max(2, len(special.prefix) + 1), 60))
    stride = draw(st.integers(1, length - max(1, len(special.prefix))))
    return special, draw(st.integers(len(special.prefix) + 2, 250)), length, stride


@given(sliding_cases())
def test_sliding_scores_each_token_in_its_first_window(case):
    special, tokens, length, stride = case
    windows = windows_of(Protocol("sliding", stride=stride), special, tokens, length)
    ids = document(tokens, special).ids.tolist()
    expected = list(sliding(ids, special.prefix, length, stride))
    assert [read_and_scored(window) for window in windows] == expected


@given(specials, st.lists(st.integers(8, 90), min_size=1, max_size=4, unique=True), st.integers(1, 4))
def test_tail_scores_the_same_tokens_at_every_length(special, lengths, targets):
    lengths = sorted(lengths)
    ids = document(120, special).ids.tolist()
    for length in lengths:
        (window,) = windows_of(Protocol("tail", targets=targets), special, 120, length, lengths[-1])
        assert (window.targets, window.stop, len(window.ids)) == (targets, lengths[-1], length)
        begun = [*special.prefix, *ids[lengths[-1] - length + len(special.prefix) : lengths[-1]]]
        assert window.ids.tolist() == begun


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if name != "recall"])
def test_lengths_may_be_compared_where_they_score_the_same_tokens(name):
    special = SpecialTokens((BOS,))
    scored = []
    for length in (24, 64, 300):
        resolved = Protocol(name).for_lengths([24, 64, 300], special)
        windows = resolved.windows(document(700, special), special, length, 300)
        scored.append([place for one in windows for place in range(one.stop - one.targets, one.stop)])
    assert (scored[0] == scored[1] == scored[2]) == (name in SAME_TOKENS)


@pytest.mark.parametrize(
    ("arguments", "lengths", "message"),
    [
        (("prefix",), [1, 8], "at least 4 tokens"),
        (("sliding", 22), [24, 64], "stride of 22 tokens.*expected 1 to 21"),
        (("tail", None, 22), [24, 64], "22 target tokens.*expected 1 to 21"),
    ],
)
def test_unsuitable_settings_are_refused(arguments, lengths, message):
    with pytest.raises(DataError, match=message):
        Protocol(*arguments).for_lengths(lengths, SpecialTokens((5, 6, BOS)))
