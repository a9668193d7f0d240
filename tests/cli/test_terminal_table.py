"""A Table in the terminal and in Markdown: all of it at any width, and no control characters."""

import re

import pytest
from rich.console import Console

from ropecli.cli.terminal_table import TerminalTable
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
        console.print(TerminalTable(table))
    return capture.get()


@pytest.mark.parametrize("width", [30, 60, 100])
def test_a_wide_table_is_split_into_blocks_that_repeat_the_names(width):
    lines = printed(WIDE, width).splitlines()
    assert max(map(len, lines)) <= width
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert [number for name, *numbers in cells if name == "none" for number in numbers] == ["12.50"] * 8
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


def test_a_path_is_shortened_and_words_are_folded():
    path, words = "runs/" + "x" * 60 + "/final", "pairs with a full rotation in pretraining and more"
    lines = printed(Table("", ["name", *"abcd"], [[path, *["12.5"] * 4], [words, *["1"] * 4]]), 60).splitlines()
    names = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert sum("12.5" in line for line in lines) == 1
    assert [name for name in names if "x" in name] == [names[0]]
    assert re.fullmatch(r"runs/x+\.\.\.x+/final", names[0])
    assert " ".join(names[1:]) == words


def test_a_pipe_gets_markdown(ropecli):
    lines = ropecli("recipe").succeeds().out.splitlines()
    assert lines[:2] == ["| name | kind | summary |", "| --- | --- | --- |"]
