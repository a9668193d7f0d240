"""Tables show the numbers and names of the reports."""

from dataclasses import replace

import pytest
from rich.console import Console

from ropecli.evaluation.results import wilson
from ropecli.reporting.tables import comparison_table, perplexity_table, retrieval_tables


def printed(table, width=200, **options):
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def shown(table, width=200):
    return [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in printed(table, width).splitlines() if "│" in line
    ]


def test_a_row_for_each_length_with_all_its_numbers(report):
    rows = shown(perplexity_table(report(18.625, 25.0, 1234.5678)))
    assert rows == [
        ["256", "18.62", "16.76 to 20.49", "2.9245", "1.4064", "1020", "4", "2.0 s", "512", "3 MiB"],
        ["512", "25.00", "22.50 to 27.50", "3.2189", "1.5480", "2044", "4", "2.0 s", "1024", "3 MiB"],
        ["1024", "1234.57", "1111.11 to 1358.02", "7.1185", "3.4233", "4092", "4", "2.0 s", "2048", "3 MiB"],
    ]


def test_the_baseline_stands_beside_and_the_headlines_below(with_baseline):
    text = printed(perplexity_table(with_baseline))
    assert [row[2] for row in shown(perplexity_table(with_baseline))] == ["18.00", "25.00", "47.00"]
    assert "baseline: base, none\n" in text
    assert "short-context cost: +1.2% (0.3 to 2.0) at 256 tokens\n" in text
    assert "long-context gain: -7.2% (-11.4 to -3.7): 1024 tokens against the baseline's 256\n" in text


def test_yarns_protocol_is_marked(report):
    yarn = replace(report(18.0, 25.0, 47.0), protocol="yarn")
    for table in (perplexity_table(yarn), comparison_table([yarn])):
        assert "YaRN's script: unweighted window means; not comparable with other protocols" in printed(table)


def test_several_checkpoints_have_a_column_and_what_is_missing_a_dash(report):
    small, large = (replace(report(18.0, 25.0, 47.0, checkpoint=name), digest=name) for name in ("small", "large"))
    large = replace(large, rows=large.rows[1:])
    yarn = replace(small, method="yarn", factor=4.0, params={"beta_fast": 8.0})
    assert shown(comparison_table([small, large, yarn])) == [
        ["small", "none", "18.00", "25.00", "47.00"],
        ["small", "yarn ×4 (beta_fast 8)", "18.00", "25.00", "47.00"],
        ["large", "none", "–", "25.00", "47.00"],
    ]


def bold(table):
    parts = printed(table, force_terminal=True, color_system="standard").split("\x1b[1m")[1:]
    return [text for part in parts if "." in (text := part.split("\x1b[0m")[0])]


def test_the_best_of_each_column_alone_is_bold(report):
    reports = [report(18.0, 25.0, 47.0), report(20.0, 19.0, 46.0, method="ntk", factor=4.0)]
    assert bold(comparison_table(reports)) == ["18.00", "19.00", "46.00"]


def test_what_cannot_be_compared_is_not_the_best(report):
    reports = [report(18.0, 25.0, 47.0), replace(report(1.0, 1.0, 1.0), protocol="tail")]
    assert not bold(comparison_table(reports))
    assert "the same tokens and protocol" in printed(comparison_table(reports))


def test_retrieval_by_depth_and_length_and_in_sum(retrieval):
    found = retrieval({(256, 0.0): 4, (256, 0.999): 3, (256, 1.0): 0, (512, 1.0): 1})
    ranked = replace(found, mode="rank", cells=[replace(cell, rank=2.5, margin=-1.5) for cell in found.cells])
    assert shown(retrieval_tables(ranked)) == [
        ["0", "100", "–"],
        ["0.999", "75", "–"],
        ["1", "0", "25"],
        ["256", "58%", "32 to 81%", "12", "2.5", "-1.50", "within"],
        ["512", "25%", "5 to 70%", "4", "2.5", "-1.50", "beyond"],
    ]
    assert shown(retrieval_tables(found))[3] == ["256", "58%", "32 to 81%", "12", "within"]
    title = printed(retrieval_tables(replace(ranked, in_memory=True, method="yarn", factor=4.0))).split("\n")[0]
    assert title.startswith("folder, yarn ×4 in memory: passkey, ranked among candidates, data demo; chance 10%")


def test_wilsons_interval():
    # Brown, Cai and DasGupta 2001: centre (p + z²/2n) / (1 + z²/n), without hits up to z²/n / (1 + z²/n)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


TABLES = [perplexity_table, lambda one: comparison_table([one])]


@pytest.mark.parametrize("draw", TABLES, ids=["one", "several"])
def test_names_are_shown_as_they_are_and_command_no_terminal(report, draw):
    name = "runs/a[/red]b 100%"
    assert printed(draw(report(1.5, 2.5, 3.5, checkpoint=name, source=name))).count(name) == 2
    text = printed(draw(report(1.5, 2.5, 3.5, checkpoint="a\x1b[2Jb\x07\n", source="c\x9b31m\u202e")))
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(text)
