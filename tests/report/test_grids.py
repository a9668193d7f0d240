"""The terminal's heat map: each number in its cell, legible with and without colours."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ropecli.evaluate.report import Cell, RetrievalReport
from ropecli.report.grids import heat_map, retrieval_grid
from ropecli.report.pivot import wilson


@pytest.fixture
def retrieval():
    """retrieval(mode) -> a report on two lengths and two depths, of which one cell is lacking."""

    def make(mode="rank", checkpoint="folder", in_memory=False):
        values = [(1.0, 3.5), (2.5, -1.25), (4.0, -3.0)] if mode == "rank" else [(None, None)] * 3
        places = [(256, 0.0, 8), (256, 0.5, 4), (512, 0.5, 0)]
        cells = [Cell(*place[:2], 8, place[2], *value) for place, value in zip(places, values, strict=True)]
        return RetrievalReport(
            checkpoint=checkpoint,
            digest="0" * 64,
            method="yarn",
            factor=4.0,
            params={},
            in_memory=in_memory,
            original_max_position_embeddings=256,
            source="demo",
            dtype="float32",
            device="cpu",
            command=["ropecli", "needle", checkpoint],
            task="needle",
            mode=mode,
            settings={},
            fingerprint="2" * 64,
            chance=0.1,
            cells=cells,
        )

    return make


def drawn(value, colours=None):
    stream = io.StringIO()
    Console(file=stream, width=120, color_system=colours, force_terminal=colours is not None).print(value)
    return stream.getvalue()


def cells_of(line):
    return [part.strip() for part in line.replace("┃", "│").split("│")[1:-1]]


def test_every_cell_holds_its_number_without_colours(retrieval):
    text = drawn(heat_map(retrieval()))
    rows = [cells_of(line) for line in text.splitlines() if "│" in line or "┃" in line]
    assert rows == [["depth", "256", "512"], ["0", "100", "–"], ["0.5", "50", "0"]]
    assert "\x1b" not in text


def test_shades_differ_and_stand_out_from_their_numbers(retrieval):
    table = heat_map(retrieval()).table(range(2), 80)
    shades = [text.style for column in table.columns[1:] for text in column.cells if text.style]

    def light(color):
        return sum(weight * value for weight, value in zip((0.299, 0.587, 0.114), color.get_truecolor(), strict=True))

    backgrounds = [light(style.bgcolor) for style in shades]
    assert backgrounds == sorted(backgrounds, reverse=True)
    assert len(set(backgrounds)) == 3
    assert all(abs(light(style.bgcolor) - light(style.color)) > 70 for style in shades)
    assert "\x1b[" in drawn(table, "truecolor")


def test_the_summary_is_over_all_depths(retrieval):
    lines = [cells_of(line) for line in drawn(retrieval_grid(retrieval())).splitlines()]
    assert ["256", "75%", "51 to 90%", "16", "1.8", "+1.12", "inside"] in lines
    assert ["512", "0%", "0 to 32%", "8", "4.0", "-3.00", "beyond"] in lines


def test_a_narrow_terminal_gets_blocks_and_every_number(retrieval):
    cells = [Cell(256 * length, depth, 100, length) for length in range(1, 21) for depth in (0.0, 0.999, 1.0)]
    stream = io.StringIO()
    Console(file=stream, width=80).print(retrieval_grid(replace(retrieval(), cells=cells)))
    rows = [cells_of(line) for line in stream.getvalue().splitlines() if "│" in line or "┃" in line]
    assert "…" not in stream.getvalue()
    assert max(map(len, stream.getvalue().splitlines())) <= 80
    for depth in ("0", "0.999", "1"):
        assert [number for row in rows if row[0] == depth for number in row[1:]] == [f"{one}" for one in range(1, 21)]


def test_wilsons_interval():
    # Brown, Cai and DasGupta 2001: centre (p + z²/2n) / (1 + z²/n), of nothing but misses up to z²/n / (1 + z²/n)
    assert wilson(0, 10) == pytest.approx((0.0, 0.27753), abs=1e-5)
    assert wilson(10, 10) == pytest.approx((1 - 0.27753, 1.0), abs=1e-5)
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-5)


def test_generated_answers_have_no_ranks(retrieval):
    text = drawn(retrieval_grid(retrieval("generate")))
    assert "rank" not in text.split("\n", 1)[1]
    assert "nan" not in text


def test_the_title_says_what_was_asked(retrieval):
    text = " ".join(drawn(retrieval_grid(retrieval(checkpoint="a\x1b[31mb", in_memory=True))).split())
    assert "yarn ×4 in memory: needle, ranked among candidates, data demo; a guess finds 10%, window 256" in text
    assert "\x1b" not in text
