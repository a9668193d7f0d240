"""The score over distance, and the distances that attention sees: against their definition."""

import math

import numpy as np
import pytest

from ropecli.analysis.score import first_negative, largest_distance, mean_rotation, scores
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import make_spec, scale

LLAMA_2 = RopeGeometry(128, 128, 10_000.0, 4096).inv_freq()
TABLES = {
    "llama 2": LLAMA_2,
    "blog": RopeGeometry(256, 256, 10_000.0, 4096).inv_freq(),
    "one pair": np.array([1.0]),
    "some still": np.array([1.0, 0.1, 0.01, 0.0]),
}


def by_hand(inv_freq: np.ndarray, distance: int) -> float:
    return math.fsum(2 * math.cos(distance * frequency) for frequency in inv_freq.tolist())


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 700), (99_990, 100_700)])
def test_a_grid_gives_the_sum(name, start, stop):
    inv_freq = TABLES[name]
    expected = np.array([by_hand(inv_freq, distance) for distance in range(start, stop)])
    np.testing.assert_allclose(scores(inv_freq, start, stop), expected, atol=1e-8)


def test_the_decay_is_that_of_two_rotated_vectors():
    distances = np.array([0, 1, 7, 4096])
    rotated = np.exp(1j * np.multiply.outer(distances + 3, LLAMA_2)) / math.sqrt(len(LLAMA_2))
    products = (rotated * np.exp(-3j * LLAMA_2) / math.sqrt(len(LLAMA_2))).sum(axis=-1)
    np.testing.assert_allclose(mean_rotation(LLAMA_2, distances), products, atol=1e-12)
    scored = [by_hand(LLAMA_2, distance) / 128 for distance in distances]
    np.testing.assert_allclose(mean_rotation(LLAMA_2, distances).real, scored, atol=1e-12)


@pytest.mark.parametrize("name", TABLES)
def test_the_first_negative(name):
    inv_freq = TABLES[name]
    values = [by_hand(inv_freq, distance) for distance in range(3000)]
    negatives = [m for m in range(3000) if values[m] < 0]
    assert first_negative(inv_freq, 2999) == (negatives[0] if negatives else None)


def test_pairs_that_do_not_rotate_raise_the_score():
    assert first_negative(np.zeros(8)) is None
    assert first_negative(np.array([1.0, 0.1, 0.0, 0.0])) is None
    assert first_negative(np.array([1.0, 0.1, 0.01, 0.0])) is not None


def test_without_a_remapping_the_last_token_sees_every_distance():
    rope = scale(RopeGeometry(32, 32, 10_000.0, 64), make_spec("yarn", 8.0))
    assert largest_distance(rope, 10**9) == 10**9 - 1
