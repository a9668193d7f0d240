"""The verdict of `check-served`, on readings and servers that are made of numbers."""

import numpy as np
import pytest

from ropecli.evaluation import served

LENGTH, PRETRAINING = 512, 256
ROLES = {served.CHECKPOINT: 0.0, served.UNPATCHED: 1.0, served.HALF: 0.5, served.DOUBLE: -0.4}
"""How far a reading lies from the checkpoint."""


@pytest.fixture(scope="module")
def log_probabilities():
    """log_probabilities(role) -> of each token but the first. Another scaling makes many less probable."""
    random = np.random.default_rng(1)
    base = -random.exponential(2.0, LENGTH - 1)
    shift = -random.exponential(1.0, LENGTH - 1) * (np.arange(1, LENGTH) >= PRETRAINING)
    other = random.normal(0, 0.3, (len(ROLES), LENGTH - 1))
    found = {
        role: base + place * shift + other[index] * (place != 0) for index, (role, place) in enumerate(ROLES.items())
    }
    return found.__getitem__


@pytest.fixture(scope="module")
def reference(log_probabilities):
    readings = [
        served.Reading(role, role, {LENGTH: (-log_probabilities(role)).tolist()}, {LENGTH: {0: -1.0}}) for role in ROLES
    ]
    singles = [served.Single(token, {token: -2.0}, {token: -2.0}) for token in range(32)]
    return served.Expected(list(range(LENGTH)), PRETRAINING, singles, readings)


def verdict_of(values, reference, after_single: float) -> served.Verdict:
    singles = [{token: -2.0 - after_single} for token in range(32)]
    return served.judge(served.Answers(True, {LENGTH: (-values).tolist()}, {}, singles), reference)


ERRORS = {
    "lowers": lambda values: values - 0.6,
    "flattens": lambda values: 0.8 * values,
    "raises what is improbable": lambda values: 0.3 + 0.75 * values,
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("role", ROLES)
def test_errors_that_move_all_log_probabilities_are_no_scaling(role, error, log_probabilities, reference):
    noise = np.random.default_rng(2).normal(0, 0.3, LENGTH - 1)
    verdict = verdict_of(ERRORS[error](log_probabilities(role)) + noise, reference, 0.6)
    assert verdict.verdict == (served.SERVED if role == served.CHECKPOINT else served.NOT_SERVED), verdict
    assert verdict.after_single == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("size", "after_single", "expected"),
    [(0.2, 0.1, "served"), (0.4, 0.02, "unclear"), (3.0, 0.1, "not served"), (3.0, 1.5, "unclear")],
)
def test_what_rounding_after_a_single_token_explains_is_rounding(
    size, after_single, expected, log_probabilities, reference
):
    """size: of a difference that points to no reading, nats."""
    noise = size * np.random.default_rng(3).choice([-1, 1], LENGTH - 1)
    verdict = verdict_of(log_probabilities(served.CHECKPOINT) + noise, reference, after_single)
    assert verdict.verdict == expected, verdict
