"""Tables show the reports' numbers, and every name as it is."""

import pytest
from rich.console import Console

from ropecli.report.tables import comparison_table, perplexity_table


def shown(table, **options):
    console = Console(width=200, **options)
    with console.capture() as capture:
        console.print(table)
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in capture.get().splitlines() if "│" in line]


def test_a_row_for_each_length_with_all_its_numbers(report):
    rows = shown(perplexity_table(report(18.625, 25.0, 1234.5678)))
    assert rows == [
        ["256", "18.62", "16.76 to 20.49", "2.9245", "1020", "4"],
        ["512", "25.00", "22.50 to 27.50", "3.2189", "2044", "4"],
        ["1024", "1234.57", "1111.11 to 1358.02", "7.1185", "4092", "4"],
    ]


def test_a_line_for_each_method_and_a_column_for_each_length(report):
    reports = [
        report(18.0, 25.0, 47.0),
        report(20.0, 19.0, 18.5, method="yarn", factor=4.0, params={"beta_fast": 8.0, "beta_slow": 1.0}),
        report(19.0, 19.5, 30.0, method="linear", factor=2.5),
    ]
    assert shown(comparison_table(reports)) == [
        ["none", "18.00", "25.00", "47.00"],
        ["yarn ×4 (beta_fast 8)", "20.00", "19.00", "18.50"],
        ["linear ×2.5", "19.00", "19.50", "30.00"],
    ]


def test_the_best_of_each_column_alone_is_bold(report):
    console = Console(width=200, force_terminal=True, color_system="standard")
    with console.capture() as capture:
        console.print(comparison_table([report(18.0, 25.0, 47.0), report(20.0, 19.0, 46.0, method="ntk", factor=4.0)]))
    bold = [part.split("\x1b[0m")[0] for part in capture.get().split("\x1b[1m")[1:]]
    assert [text for text in bold if text.replace(".", "").isdigit()] == ["18.00", "19.00", "46.00"]


@pytest.mark.parametrize("name", ["runs/a[/red]b", "runs/[v2]", "[bold]", "100%"])
@pytest.mark.parametrize("draw", [perplexity_table, lambda one: comparison_table([one])], ids=["one", "several"])
def test_a_name_is_shown_as_it_is(report, draw, name):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(draw(report(1.5, 2.5, 3.5, checkpoint=name, source=name)))
    assert capture.get().count(name) == 2
