"""Two numbers of an extension: which lengths they are taken from, and what they are by hand."""

import math

import numpy as np
import pytest

from ropecli.evaluate.headlines import headlines
from ropecli.evaluate.protocols import PROTOCOLS, Protocol
from ropecli.evaluate.tally import Tally, summarise

COST, GAIN = "short-context cost", "long-context gain"
SAME_LENGTH = "change at the same length beyond the window"
SAME_TOKENS = ("tail", "sliding", "disjoint")


def rows_of(protocol, **means):
    """rows_of("tail", at64=3.0, ...): three documents each, of mean losses about these. As many tokens are scored as
    the protocol would: the same at every length, or all but the first."""
    rows = []
    for name, mean in means.items():
        length = int(name.removeprefix("at"))
        tallies = []
        for spread in (0.9, 1.0, 1.2):
            tally = Tally()
            tally.add(np.full(length - 1 if protocol in ("prefix", "yarn") else 32, mean * spread), 1, None)
            tallies.append(tally)
        rows.append(summarise(length, tallies, ["a", "b", "c"]))
    return rows


def told(protocol, ours, theirs, window):
    found = headlines(rows_of(protocol, **ours), rows_of(protocol, **theirs), Protocol(protocol), window)
    return {one.name: (one.length, one.baseline_length) for one in found}


ALL = {"at32": 3.0, "at64": 2.9, "at128": 2.8, "at256": 2.7}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_cost_is_at_the_longest_length_inside_the_window(protocol):
    for window, expected in ((64, 64), (100, 64), (128, 128), (4096, 256), (32, 32)):
        assert told(protocol, ALL, ALL, window)[COST] == (expected, expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_gain_is_against_the_baseline_where_it_works_if_the_tokens_are_the_same(protocol):
    name, expected = (GAIN, (256, 64)) if protocol in SAME_TOKENS else (SAME_LENGTH, (256, 256))
    assert told(protocol, ALL, ALL, 64) == {COST: (64, 64), name: expected}
    assert told(protocol, ALL, ALL, 100) == {COST: (64, 64), name: expected}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_the_lengths_do_not_tell_is_left_out(protocol):
    assert told(protocol, ALL, ALL, 256) == {COST: (256, 256)}
    assert told(protocol, ALL, ALL, 31) == ({} if protocol in SAME_TOKENS else {SAME_LENGTH: (256, 256)})
    assert told(protocol, {"at64": 3.0}, {"at64": 3.0}, 64) == {COST: (64, 64)}


def test_the_numbers_by_hand():
    ours = {"at64": 3.3, "at256": 2.5}
    theirs = {"at64": 3.0, "at256": 4.0}
    for protocol, before in (("tail", 3.0), ("prefix", 4.0)):
        found = headlines(rows_of(protocol, **ours), rows_of(protocol, **theirs), Protocol(protocol), 64)
        cost, gain = (one.change for one in found)
        assert [one.name for one in found] == [COST, GAIN if protocol == "tail" else SAME_LENGTH]
        assert cost.change == pytest.approx(math.expm1(3.1 / 3 * 0.3))
        assert gain.change == pytest.approx(math.expm1(3.1 / 3 * (2.5 - before)))
        assert cost.low < cost.change < cost.high
        assert gain.low < gain.change < gain.high
