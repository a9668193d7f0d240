"""Reports of recall: one denominator for all, and tables that rank by it."""

from dataclasses import replace

import numpy as np
import pytest

from ropecli.errors import DataError
from ropecli.evaluation.report import Cell, Change
from ropecli.evaluation.statistics import ratio_interval
from ropecli.reporting.figures.plots import draw_lengths
from ropecli.reporting.report_tables import measured_tables
from ropecli.table import Bold


def cells(*losses, weight=10.0):
    """losses: (arm, length, nats per token of each document)."""
    return [
        Cell(arm, length, tuple(weight * value for value in values), (weight,) * len(values))
        for arm, length, values in losses
    ]


def referring(reports):
    return [replace(report, reference=reports[0].as_reference()) for report in reports]


NEAR = ("near", 256, (1.0, 1.2, 1.1, 0.9))
ABSENT, FAR = ("absent", 256, (3.0, 3.2, 3.1, 2.9)), ("far", 256, (1.5, 1.7, 1.6, 1.4))


@pytest.fixture
def recalled(report):
    def make(*losses, **others):
        values = {"task": "recall", "cells": cells(*losses), "settings": {"mode": "losses"}}
        return report(1.0, 1.0, 1.0, **(values | others))

    return make


def test_recall_refers_to_the_first_report(recalled):
    """One denominator for all, and never clipped."""
    base = recalled(ABSENT, FAR, NEAR, ("absent", 512, (9.0, 9.1, 9.2, 9.3)), ("far", 512, (6.0, 6.4, 6.2, 6.1)))
    better = recalled(("absent", 256, (9.0,) * 4), ("far", 256, (0.5, 0.7, 0.6, 0.4)), method="yarn", factor=4.0)
    base, better = referring([base, better])
    assert better.recall(256).change == pytest.approx(1.25)
    assert base.recall(256).change == pytest.approx(0.75)
    assert better.change_from(base, 256).change == pytest.approx(0.5)
    low, high = ratio_interval(np.array([25.0, 25, 25, 25]), np.full(4, 20.0))
    assert better.recall(256) == Change(pytest.approx(1.25), pytest.approx(low), pytest.approx(high))
    # a damaged model has a far gain, and a recall below zero
    assert base.far_gain(512).low > 2
    assert base.recall(512).high < 0
    assert (base.reads_to(), base.reads_to(0.8), better.reads_to(0.5)) == (256, None, 256)
    assert [row["value"] for row in base.as_json()["rows"]] == [base.recall(length).change for length in (256, 512)]


@pytest.mark.parametrize(
    ("sums", "passes", "expected"),
    [
        ((1.0, 1, 5, 5), (0, 0, 4, 4), ((2.0, 10), (2.0, 2))),  # passes differ, their documents do not
        ((1.0, 5, 1, 5), (0, 0, 4, 4), ((1.0, 5, 1, 5), (1.0,) * 4)),  # documents differ more than passes
        ((1.0, 5, 1, 5), (0, 0, 0, 0), ((6.0,), (2.0,))),  # a single pass has no interval
    ],
)
def test_documents_of_a_pass_are_not_independent(sums, passes, expected):
    interval = ratio_interval(np.array(sums), np.ones(4), passes)
    assert interval == pytest.approx(ratio_interval(*map(np.array, expected)))


@pytest.mark.parametrize("near", [(3.0, 3.3, 3.0, 2.9), (0.0, 5.0, 4.0, 1.0)])
def test_a_first_report_that_does_not_copy_from_near_is_refused(recalled, near):
    with pytest.raises(DataError, match=r"folder gains .* from a near copy at 256 tokens, which is not certain"):
        recalled(ABSENT, FAR, ("near", 256, near)).as_reference()


def test_methods_are_ranked_by_recall(recalled):
    def twice(arm, length, losses):
        return arm, length, losses * 2  # eight documents

    far = [("far", 256, (2.0, 2.3, 2.1, 1.8)), ("far", 256, (1.1, 1.2, 1.2, 0.9))]
    absent, own, near = (twice(*arm) for arm in (ABSENT, FAR, NEAR))
    others = [
        recalled(absent, twice(*of), near, method=name, factor=4.0, in_memory=True)
        for of, name in zip(far, ("yarn", "ntk"), strict=True)
    ]
    reports = referring([recalled(absent, own, near), *others])
    numbers, table = measured_tables(reports, verbose=True)
    assert table.heads == ["model", "256", "reads far text up to", "recall above one half up to"]
    assert [row[1][:11] for row in table.rows] == ["0.75", "0.50, -0.25", "0.97, +0.23"]
    assert [row[2:] for row in table.rows] == [["256", "256"], ["256", "–"], ["256", "256"]]
    assert [isinstance(row[1], Bold) for row in table.rows] == [False, False, True]
    assert table.notes[0] == "Best: ntk ×4."
    assert numbers.rows[1][2].startswith("0.50 (")
    assert numbers.rows[1][4:] == ["2.050", "3.050", "8"]
    values = draw_lengths(reports).axes[0]
    assert [line.get_ydata()[0] for line in values.lines[:3]] == pytest.approx([0.75, 0.5, 0.975])
