"""The smallest base: the papers' figures, and a search that tries every base and every distance."""

import math

import numpy as np
import pytest

from ropecli.analysis.base_bound import smallest_base
from ropecli.rope import RopeGeometry

HEAD = RopeGeometry(128, 128, 10_000.0, 4096)


def lowest(geometry: RopeGeometry, base: float, length: int) -> float:
    """The lowest Σ cos(mθ_i), m up to the length, cosine by cosine."""
    return float(np.cos(np.multiply.outer(np.arange(length + 1), geometry.inv_freq(base))).sum(axis=1).min())


def first_that_holds(geometry: RopeGeometry, length: int, step: float) -> float:
    """By bases from 1 on, evenly apart by the logarithm; all cosines of all of them."""
    logarithm, distances = 0.0, np.arange(length + 1)
    exponents = np.arange(geometry.pairs - geometry.still_pairs) / geometry.pairs
    while True:
        # a hundred at a time
        frequencies = np.exp(-np.multiply.outer(logarithm + step * np.arange(100), exponents))
        sums = np.cos(distances[:, None, None] * frequencies).sum(axis=-1) + geometry.still_pairs
        holding = np.flatnonzero(sums.min(axis=0) >= -1e-9)
        if holding.size:
            return math.exp(logarithm + step * holding[0])
        logarithm += 100 * step


@pytest.mark.parametrize(("length", "published", "digits"), [(1024, 4.3e3, 1), (4096, 2.7e4, 1), (8192, 8.4e4, 1)])
def test_published_figures(length, published, digits):
    smallest = smallest_base(HEAD, length)
    assert float(f"{smallest:.{digits}e}") == published
    assert lowest(HEAD, smallest, length) >= -1e-9


@pytest.mark.parametrize(
    "geometry",
    [HEAD, RopeGeometry(80, 20, 500.0, 256), RopeGeometry(64, 64, 1e4, 64, None, 5)],
    ids=["d=128", "d=20", "5 still"],
)
def test_against_a_search_through_all(geometry):
    length, step = 256, 2e-3
    expected = first_that_holds(geometry, length, step)
    smallest = smallest_base(geometry, length)
    assert expected * math.exp(-step) - 1e-9 <= smallest <= expected * (1 + 1e-5)
    assert lowest(geometry, smallest, length) >= -1e-9
