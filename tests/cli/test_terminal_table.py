"""A Table in the terminal and in Markdown: all of it at any width, and no control characters."""

import pytest
from rich.console import Console

from ropecli.cli.terminal_table import terminal_table
from ropecli.table import Bold, Table, markdown

WIDE = Table(
    "title",
    ["method", *(f"{256 << power}" for power in range(8))],
    [["none", *["12.50"] * 8], ["yarn ×4 (beta_fast 8)", *["–"] * 7, Bold("9.25")]],
    ["a note"],
)


def printed(table, width=200, **options):
    console = Console(width=width, **options)
    with console.capture() as capture:
        console.print(terminal_table(table))
    return capture.get()


@pytest.mark.parametrize("width", [40, 60, 100])
def test_a_wide_table_is_folded_into_the_terminal(width):
    lines = printed(WIDE, width).splitlines()
    assert max(map(len, lines)) <= width
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    number = "".join(last for *_, last in cells)
    assert number == "12.509.25"
    assert (lines[0].strip(), lines[-1].strip()) == ("title", "a note")


def test_bold_in_both():
    text = printed(WIDE, force_terminal=True, color_system="standard")
    assert "\x1b[1m 9.25\x1b[0m" in text
    assert "\x1b[1m12.50" not in text
    assert "| 9.25* |" in markdown(WIDE)


@pytest.mark.parametrize("show", [printed, markdown])
def test_names_are_shown_as_they_are_and_control_nothing(show):
    text = show(Table("a[/red]b 100%", ["a\x1b[2Jb\x07\n"], [["c\x9b31m"], ["d\u202e"]], ["e\u2028"]))
    assert not {"\x1b", "\x07", "\x9b", "\u202e", "\u2028"} & set(text)
    assert text.replace("\\", "").count("a[/red]b 100%") == 1
    assert "| a\\|b \\<!-- |" in markdown(Table("", ["name"], [["a|b <!--"]]))


def test_a_pipe_gets_markdown(ropecli):
    lines = ropecli("recipe").succeeds().out.splitlines()
    assert lines[:2] == ["| name | kind | summary |", "| --- | --- | --- |"]
