"""What the states of a tuned model are called, and which numbers stand under them."""

from dataclasses import replace

import pytest

from ropecli.report.tuned.cells import states_of


@pytest.mark.parametrize(
    ("level", "changes", "name"),
    [
        ("heads", {}, "yarn ×4, tuned (heads, step 100)"),
        ("heads", {"step": 0, "learned": 0, "gains": []}, "yarn ×4, heads found nothing better"),
        ("grid", {}, "yarn ×4, tuned (grid)"),
    ],
)
def test_the_result_is_called_by_what_came_of_it(tuning, level, changes, name):
    *_, result = states_of(replace(tuning(level), **changes)).rows
    assert result[0] == name


def test_what_it_is_held_against_is_called_as_the_report_calls_it(tuning):
    rows = states_of(tuning("grid", plain_name="abf ×4 (beta 27.6), a point")).rows
    assert rows[1][:3] == ["abf ×4 (beta 27.6), a point", "15.47", "14.91"]


def test_at_factor_one_there_is_one_length(tuning):
    cells = states_of(tuning("grid", factor=1.0, target_length=256))
    assert cells.heads == ["model", "perplexity at 256", "documents", "numbers learned", "time"]
    assert cells.rows[1] == ["yarn ×4, nothing tuned", "15.47", "16", "–", "–"]
