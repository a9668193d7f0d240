"""The smallest base: the papers' figures, and the score at every distance."""

import numpy as np
import pytest

from ropecli.analysis.base_bound import smallest_base
from ropecli.rope import RopeGeometry

HEAD = RopeGeometry(128, 128, 10_000.0, 4096)


def lowest(geometry: RopeGeometry, base: float, length: int) -> float:
    """The lowest Σ cos(mθ_i), m up to the length, cosine by cosine."""
    return float(np.cos(np.multiply.outer(np.arange(length + 1), geometry.inv_freq(base))).sum(axis=1).min())


@pytest.mark.parametrize(("length", "published", "digits"), [(1024, 4.3e3, 1), (4096, 2.7e4, 1), (8192, 8.4e4, 1)])
def test_published_figures(length, published, digits):
    smallest = smallest_base(HEAD, length)
    assert float(f"{smallest:.{digits}e}") == published
    assert lowest(HEAD, smallest, length) >= -1e-9
