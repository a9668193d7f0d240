"""Tables of reports show their numbers, compare only the same data, and emphasize only what the intervals say."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ropecli.evaluation.statistics import bootstrap_interval
from ropecli.reporting.lines import sets_of
from ropecli.reporting.report_tables import measured_tables
from ropecli.reporting.summary import Summary
from ropecli.table import Bold


def compared(*reports, **options):
    """The table of lines side by side."""
    return measured_tables(reports, **options)[-1]


def bold(table):
    return [[str(cell) for cell in row if isinstance(cell, Bold)] for row in table.rows]


def test_a_row_for_each_length_with_all_its_numbers(report):
    (table,) = measured_tables([report(18.625, 25.0, 1234.5678)], verbose=True)
    assert table.rows == [
        ["256", "18.62", "16.76 to 20.49", "2.9245", "1.4064", "1020", "4"],
        ["512", "25.00", "22.50 to 27.50", "3.2189", "1.5480", "2044", "4"],
        ["1024", "1234.57", "1111.11 to 1358.02", "7.1185", "3.4233", "4092", "4"],
    ]


EIGHT = (0.2, 0.5, 1.4, 1.9, 0.3, 0.6, 1.5, 1.6)


def test_changes_are_paired_and_the_best_are_bold(report, changed):
    """Documents differ by far more than methods: only paired intervals tell the methods apart."""
    first = report(20.0, 20.0, 20.0, shares=EIGHT)
    lower, higher, either = (-0.05, -0.06, -0.05, -0.04) * 2, (0.05, 0.06, 0.05, 0.04) * 2, (-0.2, 0.2, 0.1, -0.1) * 2
    yarn, ntk = changed(first, "yarn", lower, higher, lower), changed(first, "ntk", higher, either, either)
    assert yarn.cells[0].high > first.cells[0].low  # the intervals of each overlap
    assert bold(compared(first, yarn, ntk)) == [["20.00"], ["19.02", "19.02"], ["20.00", "20.00"]]
    table = compared(first, yarn, ntk, verbose=True)
    assert table.notes[0] == "Best: yarn ×4."  # ntk is not worse there, but costs more
    assert table.notes[-2] == "best, or not worse by the paired 95% interval"
    change = yarn.change_from(first, 256)
    assert change.high < 0
    assert table.rows[1][1] == f"19.02, -4.9% ({100 * change.low:.1f} to {100 * change.high:.1f})"


def test_a_checkpoint_and_its_method_in_memory_are_one_row(report, changed):
    first = report(20.0, 20.0, 20.0)
    yarn = changed(first, "yarn", -1, -1, -1)
    saved = replace(yarn, checkpoint="y4", in_memory=False)
    repeated = replace(first, cells=first.cells[:1])  # a baseline is measured at fewer lengths
    assert [row[0] for row in compared(first, yarn, repeated, saved).rows] == ["folder (base)", "y4 (yarn ×4)"]


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "9" * 64}, {"task": "tail"}, {"settings": {"stride": 64}}, {"shares": (1.0, 2.0)}],
    ids=["data", "protocol", "stride", "documents"],
)
def test_reports_that_are_not_comparable_have_tables_of_their_own(report, change):
    reports = [report(18.0, 25.0, 47.0), report(1.0, 1.0, 1.0, **{"method": "yarn", **change})]
    tables = measured_tables(reports)
    assert [len(table.rows) for table in tables] == [3, 3]
    assert not any(map(any, map(bold, tables)))


def test_scores_are_compared_by_prompt(retrieval):
    few = retrieval({(256, 0.0): 10, (512, 0.0): 10}, trials=40)
    many = retrieval({(256, 0.0): 35, (512, 0.0): 11}, trials=40, method="yarn", factor=4.0)
    table = compared(few, many)
    assert table.rows == [["base", "25.0", "25.0"], ["folder (yarn ×4)", "87.5", "27.5"]]
    assert bold(table) == [["25.0"], ["87.5", "27.5"]]
    assert table.notes[0].startswith("No method is certainly best. folder (yarn ×4) leads at 512 tokens")
    low, high = (100 * end for end in (many.change_from(few, 256).low, many.change_from(few, 256).high))
    assert compared(few, many, verbose=True).rows[1][1] == f"87.5, +62.5 points ({low:.1f} to {high:.1f})"


def test_a_base_and_its_extension_have_cost_and_gain(with_baseline):
    base, extended = with_baseline
    table = compared(*with_baseline)
    sums = [np.array(cell.sums) for cell in (base.cells[0], *extended.cells)]
    weights = np.array(base.cells[0].weights)
    for index, where in ((1, " at 256 tokens changes by "), (3, " at 1024 tokens: 17.00, ")):
        low, high = (100 * (end - 1) for end in bootstrap_interval(sums[index] - sums[0], weights))
        change = 100 * math.expm1((sums[index] - sums[0]).sum() / weights.sum())
        assert f"{where}{change:+.1f}% ({low:.1f} to {high:.1f})" in table.notes[1]
    assert table.notes[1].endswith("from the base at 256 tokens.")


def test_models_that_lack_the_base_s_length_are_compared_at_their_own(report, changed):
    base = report(18.0, 25.0, 47.0, shares=np.linspace(0.8, 1.2, 16), document_names=[f"{n}" for n in range(16)])
    yarn, ntk = (changed(base, method, 0.0, -0.4, -0.8) for method in ("yarn", "ntk"))
    short, *long = (replace(each, cells=[each.cells[place]]) for each, place in ((base, 0), (yarn, 2), (ntk, 2)))
    best, others = Summary(sets_of([short, *long])).best
    assert (best.report.method, [line.report.method for line in others]) == ("yarn", ["ntk"])
