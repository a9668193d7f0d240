"""Tables of reports show their numbers, compare only the same data, and emphasize only what the intervals say."""

import math
from dataclasses import replace

import numpy as np
import pytest

from ropecli.evaluation.statistics import bootstrap_interval, wilson
from ropecli.reporting.report_tables import comparison_tables, report_tables, tuning_runs, tuning_table
from ropecli.table import Bold


def compared(*reports, **options):
    """The rows of the only table, or of the table and its differences."""
    tables = comparison_tables(reports, **options)
    return tables[0] if len(tables) == 1 else tables


def bold(table):
    return [[str(cell) for cell in row if isinstance(cell, Bold)] for row in table.rows]


def test_a_row_for_each_length_with_all_its_numbers(report):
    table, _ = report_tables(report(18.625, 25.0, 1234.5678))
    assert table.rows == [
        ["256", "18.62", "16.76 to 20.49", "2.9245", "1.4064", "1020", "4", "2 s", "512", "3.1 MB"],
        ["512", "25.00", "22.50 to 27.50", "3.2189", "1.5480", "2044", "4", "2 s", "1024", "3.1 MB"],
        ["1024", "1234.57", "1111.11 to 1358.02", "7.1185", "3.4233", "4092", "4", "2 s", "2048", "3.1 MB"],
    ]


def test_several_checkpoints_have_a_column_and_missing_lengths_a_dash(report):
    small, large = (report(18.0, 25.0, 47.0, checkpoint=name, digest=name) for name in ("small", "large"))
    large = replace(large, cells=large.cells[1:])
    yarn = replace(small, method="yarn", factor=4.0, params={"beta_fast": 8.0})
    table = compared(small, large, yarn)
    assert table.rows == [
        ["small", "none", "18.00", "25.00", "47.00"],
        ["small", "yarn ×4 (beta_fast 8)", "18.00", "25.00", "47.00"],
        ["large", "none", "–", "25.00", "47.00"],
    ]
    assert table.sections == {2}
    assert table.title.endswith("data demo, 4 documents")


def changed(report, method, *changes):
    """The report with each document's loss at each length changed by these nats."""
    cells = []
    for cell, added in zip(report.cells, changes, strict=True):
        losses = np.array(cell.sums) + np.array(added) * cell.weights
        cells.append(replace(cell, sums=tuple(losses)))
    return replace(report, method=method, factor=4.0, cells=cells)


def test_differences_are_paired_and_the_best_are_bold(report):
    """Documents differ by far more than methods: only paired intervals tell the methods apart."""
    first = report(20.0, 20.0, 20.0, shares=(0.2, 0.5, 1.4, 1.9))
    lower, higher, either = (-0.05, -0.06, -0.05, -0.04), (0.05, 0.06, 0.05, 0.04), (-0.2, 0.2, 0.1, -0.1)
    yarn, ntk = changed(first, "yarn", lower, higher, lower), changed(first, "ntk", higher, either, either)
    assert yarn.cells[0].high > first.cells[0].low  # the intervals of each overlap
    table, differences = compared(first, yarn, ntk, verbose=True)
    assert bold(table) == [["20.00"], ["19.02", "19.02"], ["20.00", "20.00"]]
    best = "At 1024 tokens, yarn ×4 has the lowest perplexity, 19.02; by the paired 95% intervals, not worse: ntk ×4."
    assert table.notes[-3] == best
    assert table.notes[-1] == "bold: best, or not worse by the paired 95% interval"
    assert differences.title.startswith("folder: change of perplexity in percent from none")
    change = yarn.change_from(first, 256)
    assert change.high < 0
    assert differences.rows[0][:2] == ["yarn ×4", f"-4.9 ({100 * change.low:.1f} to {100 * change.high:.1f})"]


@pytest.mark.parametrize(
    "change",
    [{"fingerprint": "9" * 64}, {"task": "tail"}, {"settings": {"stride": 64}}, {"shares": (1.0, 2.0)}],
    ids=["data", "protocol", "stride", "documents"],
)
def test_reports_that_are_not_comparable_have_tables_of_their_own(report, change):
    reports = [report(18.0, 25.0, 47.0), report(1.0, 1.0, 1.0, **{"method": "yarn", **change})]
    tables = comparison_tables(reports, verbose=True)
    assert [len(table.rows) for table in tables] == [1, 1]
    assert not any(map(any, map(bold, tables)))


def test_different_data_have_a_note(report):
    tables = comparison_tables([report(18.0, 25.0, 47.0), report(1.1, 1.1, 1.1, fingerprint="9" * 64)])
    assert tables[1].notes[-1] == "different data: the numbers of different tables and panels are not comparable"


def test_scores_are_compared_by_prompt(retrieval):
    few = retrieval({(256, 0.0): 10, (512, 0.0): 10}, trials=40)
    many = retrieval({(256, 0.0): 35, (512, 0.0): 11}, trials=40, method="yarn", factor=4.0)
    table, differences = compared(few, many, verbose=True)
    assert table.rows == [["none", "25.0", "25.0"], ["yarn ×4", "87.5", "27.5"]]
    assert bold(table) == [["25.0"], ["87.5", "27.5"]]
    assert table.notes[0] == (
        "At 512 tokens, yarn ×4 has the highest score, 27.5%; by the paired 95% intervals, no other is worse."
    )
    low, high = (100 * end for end in (many.change_from(few, 256).low, many.change_from(few, 256).high))
    assert differences.rows[0][1] == f"+62.5 ({low:.1f} to {high:.1f})"


def test_a_base_and_its_extension_have_cost_and_gain(with_baseline):
    base, extended = with_baseline
    table = compared(*with_baseline)
    sums = [np.array(cell.sums) for cell in (base.cells[0], *extended.cells)]
    weights = np.array(base.cells[0].weights)
    for note, index, where in zip(
        table.notes, (1, 3), (" at 256", ": 1024 tokens against the baseline's 256"), strict=False
    ):
        low, high = (100 * (end - 1) for end in bootstrap_interval(sums[index] - sums[0], weights))
        change = 100 * math.expm1((sums[index] - sums[0]).sum() / weights.sum())
        assert f"{change:+.1f}% ({low:.1f} to {high:.1f}){where}" in note
    assert [note.partition(":")[0] for note in table.notes[:2]] == ["short-context cost", "long-context gain"]


def test_scores_by_depth_and_length_and_their_mean(retrieval):
    hits = {(256, 0.0): 4, (256, 0.999): 3, (256, 1.0): 0, (512, 1.0): 1}
    ranked = retrieval(hits, settings={"mode": "rank"})
    (table,) = report_tables(ranked)
    assert table.heads == ["depth", "256", "512"]
    assert table.rows == [
        ["0", "100", "–"],
        ["0.999", "75", "–"],
        ["1", "0", "25"],
        ["mean", "58.3", "25.0"],
        ["95% (Wilson)", "32 to 81", "5 to 70"],
        ["prompts", "12", "4"],
    ]
    assert table.notes[0] == "Guessing scores 10%."


def test_wilsons_interval():
    # Brown, Cai and DasGupta 2001: centre (p + z²/2n) / (1 + z²/n), without hits up to z²/n / (1 + z²/n)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


def test_the_loss_by_tokens_of_context(report):
    _, table = report_tables(report(20.0, 19.0, 18.0))
    assert table.title == "folder: loss by tokens of context at 1024 tokens, protocol prefix, data demo, 4 documents"
    assert table.rows[0] == ["1", "6.0000", "4"]
    assert table.rows[2] == ["64 to 95", f"{math.log(18):.4f}", "128"]


def test_a_tuning_run_by_state_and_several_by_result(tuning):
    heads = tuning("heads")
    table = tuning_table(heads)
    assert [row[:4] for row in table.rows] == [
        ["as pretrained", "1300.00", "1600.00", "–"],
        ["yarn ×2, nothing tuned", "1490.00", "1900.00", "–"],
        ["yarn ×2, best constants", "1520.00", "1700.00", "0"],
        ["yarn ×2, tuned (heads, step 4)", "1480.00", "1580.00", "65"],
    ]
    runs = tuning_runs([heads, tuning("grid", source="other", fingerprint="4" * 64)])
    assert [row[0] for row in runs.rows] == ["heads, yarn ×2", "grid, yarn ×2"]
    assert runs.notes == ["Different checkpoints, data or lengths: the perplexities are not comparable."]
    assert len(tuning_table(tuning("grid", target_length=64)).heads) == 4  # factor 1
