"""Charts of characters: every point has its line's letter where its numbers put it, in ASCII where there is no more."""

from dataclasses import replace
from io import BytesIO, TextIOWrapper

import pytest
from rich.console import Console

from ropecli.errors import DataError
from ropecli.report.charts import Chart, Series
from ropecli.report.kinds import KINDS, choose_kind
from ropecli.report.metrics import METRICS
from ropecli.report.ticks import even_numbers, round_numbers, with_room

PPL = METRICS["ppl"]


def printed(renderable, width=100, encoding="utf-8"):
    file = TextIOWrapper(BytesIO(), encoding=encoding, errors="replace")
    Console(file=file, width=width).print(renderable)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def letters(text, letter):
    """(row, column) of a letter within the axes, columns from the axis on."""
    rows = [line for line in text.splitlines() if "│" in line or "┼" in line]
    places = []
    for row, line in enumerate(rows):
        inside = line.replace("│", "┼", 1).partition("┼")[2]
        places += [(row, column) for column, character in enumerate(inside) if character == letter]
    return sorted(places, key=lambda place: place[1])


@pytest.fixture
def reports(report):
    return [report(10.0, 100.0, 1000.0), report(1000.0, 31.6227766, 10.0, method="yarn", factor=4.0)]


def test_points_stand_where_their_numbers_put_them(reports):
    text = printed(KINDS["perplexity"].terminal(reports, PPL))
    a, b = letters(text, "a"), letters(text, "b")
    assert [row for row, _ in a] == [17, 8, 0]  # of 18, logarithmic
    assert [row for row, _ in b] == [0, 13, 17]
    columns = [column for _, column in a]
    assert columns == [column for _, column in b]
    assert columns[0] == 0
    assert columns[1] * 2 == pytest.approx(columns[2], abs=1)
    assert "a  none: 1000.00 at 1024" in text
    assert "b  yarn ×4: 10.00 at 1024" in text
    assert "┊  pretraining window: 256 tokens" in text
    assert "folder, protocol prefix, data demo" in text
    assert "perplexity (lower is better), logarithmic" in text


@pytest.mark.parametrize("kind", ["perplexity", "context", "comparison"])
@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_plain_ascii_where_the_terminal_has_no_more(reports, kind, width):
    text = printed(KINDS[kind].terminal(reports, PPL), width, encoding="ascii")
    assert text.replace("×", "?").isascii()
    assert text.count("?") <= text.count("?4")  # nothing of ours had to be replaced


@pytest.mark.parametrize("kind", ["perplexity", "context", "comparison"])
def test_no_line_is_wider_than_the_terminal(reports, kind):
    text = printed(KINDS[kind].terminal(reports, PPL), 60)
    assert max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("width", [30, 40, 60])
def test_a_narrow_terminal_gets_every_number_of_a_comparison(reports, width):
    text = printed(KINDS["comparison"].terminal(reports, PPL), width)
    assert all(text.count(f"{row.ppl:.2f}") >= 1 for one in reports for row in one.rows)


def test_letters_that_meet_stand_side_by_side(report):
    same = [report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(3)]
    assert "abc" in printed(KINDS["perplexity"].terminal(same, PPL))
    many = [report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(9)]
    assert "abcd+" in printed(KINDS["perplexity"].terminal(many, PPL))


def test_a_comparison_has_the_numbers_and_longer_bars_for_the_worse(reports):
    rows = [line for line in printed(KINDS["comparison"].terminal(reports, PPL)).splitlines() if "│" in line]
    assert [cell.split()[0] for cell in rows[0].split("│")[2:-1]] == ["10.00", "100.00", "1000.00"]
    assert [cell.count("█") for cell in rows[0].split("│")[2:-1]] == [0, 10, 10]
    assert [cell.count("█") for cell in rows[1].split("│")[2:-1]] == [10, 0, 0]


def test_a_distant_window_is_a_note(reports):
    text = printed(KINDS["perplexity"].terminal([replace(reports[0], original_max_position_embeddings=2**17)], PPL))
    assert "all lengths lie inside the window of 131072 tokens" in text
    assert "┊" not in text
    near = printed(KINDS["perplexity"].terminal([replace(reports[0], original_max_position_embeddings=2048)], PPL))
    assert near.count("┊") == 19


@pytest.mark.parametrize("ppls", [(1.0, 1.0, 1.0), (1e300, 0.99, 1.0)])
@pytest.mark.parametrize("kind", ["perplexity", "context", "comparison"])
def test_extreme_numbers_can_be_drawn(report, ppls, kind):
    assert printed(KINDS[kind].terminal([report(*ppls)], PPL))


def test_other_data_are_warned_of_and_other_protocols_refused(reports):
    other = replace(reports[1], fingerprint="2" * 64)
    assert "different data" in printed(KINDS["perplexity"].terminal([reports[0], other], PPL))
    for kind in ("perplexity", "context", "comparison"):
        with pytest.raises(DataError, match="different protocols"):
            KINDS[kind].terminal([reports[0], replace(reports[1], protocol="yarn")], PPL)


def test_the_kind_that_suits(report, retrieval):
    one = report(18.0, 25.0, 47.0)
    found = retrieval({(256, 0.0): 4})
    assert choose_kind([one] * 3) is KINDS["perplexity"]
    assert choose_kind([one] * 9) is KINDS["comparison"]
    assert choose_kind([one, one, replace(one, digest="2" * 64)]) is KINDS["comparison"]
    assert choose_kind([found]) is KINDS["retrieval"]
    assert choose_kind([one], "context") is KINDS["context"]
    for reports, kind, expected in (
        ([one, found], None, "different kinds"),
        ([one, found], "context", "does not draw a retrieval report"),
        ([one], "contxt", "Did you mean 'context'"),
    ):
        with pytest.raises(DataError, match=expected):
            choose_kind(reports, kind)


@pytest.mark.parametrize(
    ("low", "high"), [(1, 1e6), (18, 25), (18.3, 18.9), (9, 11), (1, 1), (1e-3, 1e300), (100, 101), (0.99, 1.0)]
)
@pytest.mark.parametrize("most", [4, 9])
def test_ticks_are_round_few_and_inside(low, high, most):
    for ticks in (round_numbers(low, high, most), even_numbers(low, high, most)):
        assert 1 <= len(ticks) <= most + 1
        assert all(low <= tick * (1 + 1e-9) and tick <= high * (1 + 1e-9) for tick in ticks)
        assert ticks == sorted(set(ticks))


@pytest.mark.parametrize(("low", "high"), [(11, 17), (13, 32), (6.01, 6.02), (95, 310)])
def test_a_logarithmic_axis_has_four_ticks_or_more(low, high):
    assert len(round_numbers(low, high, 9)) >= 4


def test_numbers_on_an_axis_do_not_touch_and_powers_of_two_come_first():
    lengths = [3000, 3900, 4000, 4096, 4200, 8192, 16000, 16384]
    assert with_room(lengths, lambda length: length / 1000, lambda length: 0.5) == [3000, 4096, 8192, 16384]


def chart_of(*series, **settings):
    return Chart("title", "x", "y", series, **{"logarithmic": False, "shown": "{:g}".format, **settings})


def test_a_linear_x_axis_has_round_numbers_from_zero_on():
    line = Series("line", [(0.0, 0.0), (10.0, 1.0), (40.0, 4.0)])
    text = printed(chart_of(line, x_logarithmic=False))
    places = letters(text, "a")
    assert [row for row, _ in places] == [17, 13, 0]
    columns = [column for _, column in places]
    assert columns[0] == 0
    assert columns[1] * 4 == pytest.approx(columns[2], abs=2)
    numbers = text.splitlines()[21].split()
    assert [float(number) for number in numbers] == sorted(map(float, numbers))
    assert {"0", "10", "20", "40"} <= set(numbers)
    assert "a  line: 4 at 40" in text


def test_small_numbers_on_both_axes():
    """Single points, as of a comparison of methods by two quantities."""
    text = printed(
        chart_of(
            Series("one", [(0.027, 0.4)]),
            Series("other", [(0.076, 0.1)]),
            shown_x="{:.3f}".format,
        ),
        60,
    )
    assert "a  one: 0.4 at 0.027" in text
    assert "b  other: 0.1 at 0.076" in text
    (a,), (b,) = letters(text, "a"), letters(text, "b")
    assert (a[0], b[0]) == (0, 17)
    assert a[1] < b[1]
    assert {"0.03", "0.05"} <= set(text.splitlines()[21].split())


def test_marks_and_levels_stand_at_their_numbers_and_are_named():
    line = Series("line", [(0.0, 0.0), (40.0, 17.0)])
    text = printed(chart_of(line, x_logarithmic=False, marks=[(20.0, "half")], levels=[(12.0, "twelve")]))
    rows = text.splitlines()[2:20]
    assert [index for index, row in enumerate(rows) if row.count("┈") > 60] == [5]
    assert [row.count("┊") for row in rows].count(1) >= 17
    column = {row.index("┊") for row in rows if "┊" in row}
    end = letters(text, "a")[1][1]
    assert [at - rows[0].index("│" if "│" in rows[0] else "┼") - 1 for at in column] == [round(end / 2)]
    assert "┊  half" in text
    assert "┈  twelve" in text
    plain = printed(chart_of(line, marks=[(20.0, "half")], levels=[(12.0, "twelve")], x_logarithmic=False), 80, "ascii")
    assert plain.isascii()
    assert "?" not in plain


def test_a_level_beyond_the_data_is_on_the_chart():
    text = printed(chart_of(Series("line", [(1.0, 1.0), (2.0, 2.0)]), levels=[(10.0, "ten")]))
    assert "┈" in text.splitlines()[2]


def test_a_dense_line_has_few_letters_and_a_dot_at_each_point():
    points = [(float(x), float(x)) for x in range(64)]
    text = printed(chart_of(*(Series(name, points, dense=True) for name in "pqr"), x_logarithmic=False), 100)
    found = {letter: letters(text, letter) for letter in "abc"}
    assert all(4 <= len(places) <= 8 for places in found.values())
    # lines that lie on each other are both named along the way, and at the end side by side
    assert "abc" in text.splitlines()[2]
    assert not {column for _, column in found["a"]} & {column for _, column in found["b"]}
    rows = [line for line in text.splitlines() if "│" in line or "┼" in line]
    assert sum(row.count("·") + sum(row.count(letter) for letter in "abc") for row in rows[:18]) >= 64


def test_a_dense_line_of_one_point_has_its_letter():
    assert len(letters(printed(chart_of(Series("p", [(1.0, 1.0)], dense=True))), "a")) == 1


def test_values_without_a_place_stand_at_the_edges():
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, 100.0), (3.0, float("inf"))]
    text = printed(chart_of(Series("p", points), logarithmic=True, x_logarithmic=False))
    assert [row for row, _ in letters(text, "a")] == [17, 15, 2, 0]
    rows = text.splitlines()[2:20]
    assert rows[0].lstrip().startswith("∞┼")
    assert rows[17].lstrip().startswith("0┼")
    assert "·" not in rows[1] + rows[16]  # no path leads there
    assert "inf┼".replace("┼", "+") in printed(
        chart_of(Series("p", points), logarithmic=True, x_logarithmic=False), 80, "ascii"
    )


@pytest.mark.parametrize("dense", [False, True])
def test_a_gap_has_no_path(dense):
    nan = float("nan")
    text = printed(
        chart_of(Series("p", [(0.0, 1.0), (10.0, 1.0), (20.0, nan), (30.0, 1.0)], dense), x_logarithmic=False)
    )
    row = next(line for line in text.splitlines() if "a" in line and "┼" in line)
    end = letters(text, "a")[-1][1]
    assert set(row.partition("┼")[2][end // 3 + 1 : end]) == {" "}
    assert "p: 1 at 30" in text
