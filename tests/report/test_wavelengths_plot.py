"""Wavelengths by pair: what is drawn is what the ropes hold, and no pair is left out."""

import math
import xml.etree.ElementTree as ET
from itertools import combinations

import numpy as np
import pytest
from by_pair_drawn import TWELVE, lines, printed, texts

from ropecli.errors import DataError
from ropecli.report.plots import style
from ropecli.report.study.wavelengths import chart, figure


def test_every_rope_is_a_line_of_its_wavelengths(study):
    of = study("linear", "yarn", "llama3")
    (axes,) = figure(of).axes
    drawn = lines(axes)
    # λ = 2π·b^(2i/d): at b = 10,000 and d = 128, the pair i = 45 is the last within 4096 tokens
    counts = {"pretrained": 46, "linear ×8": 31, "yarn ×8": 39, "llama3 ×8": 40}
    for name, rope in of.ropes.items():
        line = drawn.pop(f"{name} ({counts[name]})")
        np.testing.assert_array_equal(line.get_xdata(), np.arange(64))
        np.testing.assert_allclose(line.get_ydata(), 2 * math.pi / rope.inv_freq)
    assert {name: line.get_ydata()[0] for name, line in drawn.items()} == {
        "target: 32768": 32768,
        "pretraining window: 4096": 4096,
    }
    assert axes.get_yscale() == "log"
    assert "tokens" in axes.get_ylabel()


def test_markers_are_filled_where_a_pair_turns_inside_the_window(study):
    (axes,) = figure(study("linear", "yarn")).axes
    markers = [line for line in axes.lines if line.get_label() == "_markers"]
    filled = [y for line in markers if line.get_markerfacecolor() != "white" for y in line.get_ydata()]
    hollow = [y for line in markers if line.get_markerfacecolor() == "white" for y in line.get_ydata()]
    assert max(filled) < 4096 < min(hollow)
    assert 3 * 8 <= len(filled) + len(hollow) <= 3 * 16
    # lines that lie on each other have their markers side by side
    places = [{*line.get_xdata()} for line in markers if line.get_markerfacecolor() != "white"]
    assert all(not one & other for one, other in combinations(places, 2))


@pytest.mark.parametrize("still_pairs", [0, 8])
def test_pairs_that_do_not_turn_stand_above_the_axis(study, still_pairs):
    of = study("p-rope", "nope", still_pairs=still_pairs)
    drawn = figure(of)
    (axes,) = drawn.axes
    rows = [line for line in axes.lines if line.get_label() == "_∞"]
    still = [rope.inv_freq == 0 for rope in of.ropes.values() if not rope.inv_freq.all()]
    for row, pairs in zip(rows, still, strict=True):
        np.testing.assert_array_equal(np.isfinite(row.get_ydata()), pairs)
    heights = [np.nanmax(row.get_ydata()) for row in rows]
    top = max(*of.ropes["pretrained"].wavelength[: 64 - still_pairs], of.target)
    assert top < heights[0]
    assert heights == sorted(set(heights))
    assert heights[-1] < axes.get_ylim()[1]
    assert (
        dict(zip(axes.get_yticks(), [one.get_text() for one in axes.get_yticklabels()], strict=True))[
            math.sqrt(heights[0] * heights[-1])
        ]
        == "∞"
    )
    note = drawn.get_supxlabel()
    assert "16 of 64 pairs of p-rope ×8, 64 of 64 pairs of nope ×8" in note
    assert ("8 of 64 pairs of pretrained" in note) == (still_pairs > 0)


def test_methods_that_change_distances_are_told_of(study):
    assert "rerope ×8 changes distances and no frequency" in figure(study("rerope", "yarn")).get_supxlabel()
    assert figure(study("yarn")).get_supxlabel() == ""


def test_the_title_says_of_what(study):
    heading = figure(study("yarn", rotary_dim=32)).get_suptitle().replace("\n", " ")
    for part in ("folder", "rotary_dim 32 of head_dim 128", "rope_theta 10000", "window 4096", "target 32768 tokens"):
        assert part in heading


def test_one_line_where_window_and_target_are_the_same(study):
    levels = [name for name in lines(figure(study()).axes[0]) if "window" in name]
    assert levels == ["pretraining window and target: 4096"]


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("methods", [("yarn",), ("nope",), TWELVE])
@pytest.mark.parametrize("head_dim", [2, 4, 32, 256])
def test_no_text_lies_on_another_or_outside(study, methods, head_dim):
    able = [method for method in methods if head_dim > 2 or method != "ntk"]  # which wants two pairs
    drawn = figure(study(*able, head_dim=head_dim))
    found = texts(drawn)
    assert all(drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 for _, box in found)
    assert all(drawn.bbox.y0 <= box.y0 and box.y1 <= drawn.bbox.y1 for _, box in found)
    assert [(a, b) for (a, one), (b, other) in combinations(found, 2) if one.overlaps(other)] == []


@pytest.mark.parametrize("head_dim", [2, 4, 16, 128])
def test_pairs_are_whole_numbers(study, head_dim):
    (axes,) = figure(study("linear", head_dim=head_dim)).axes
    low, high = axes.get_xlim()
    inside = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert inside
    assert set(inside) <= set(range(head_dim // 2))


def test_the_legend_takes_no_room_from_the_axes(study):
    for methods in (("yarn",), [f"linear*{factor}" for factor in range(2, 40)]):
        drawn = figure(study(*methods))
        with style.drawing():
            drawn.draw_without_rendering()
        assert drawn.axes[0].get_position().width * drawn.get_size_inches()[0] > 5.5


def test_more_ropes_than_looks_are_refused(study):
    figure(study(*(f"linear*{factor}" for factor in range(2, style.MOST_LINES + 1))))
    with pytest.raises(DataError, match="45 lines are too many"):
        figure(study(*(f"linear*{factor}" for factor in range(2, style.MOST_LINES + 2))))


def test_an_svg_names_what_it_shows(study, tmp_path):
    style.save(figure(study("yarn", "p-rope")), tmp_path / "plot.svg")
    found = ["".join(one.itertext()) for one in ET.parse(tmp_path / "plot.svg").iter() if one.tag.endswith("}text")]
    assert {"yarn ×8 (39)", "p-rope ×8 (46)", "target: 32768", "∞", "less than a turn in it"} <= set(found)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_terminal_has_the_same(study, width, encoding):
    text = printed(chart(study("yarn", "nope", "rerope")), width, encoding)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.replace("?", "×").split())
    assert "a pretrained, 46 of 64 inside the window: 54410 tokens at pair 63" in flat
    assert "b yarn ×8, 39 of 64 inside the window: 435281 tokens at pair 63" in flat
    assert "c nope ×8, 0 of 64 inside the window: no turn at pair 63" in flat
    assert "pretraining window: 4096 tokens" in flat
    assert "target: 32768 tokens" in flat
    assert "shown at the upper edge: 64 of 64 pairs of nope ×8" in flat
    upper = next(line for line in text.splitlines() if line.lstrip().startswith(("∞", "inf")))
    assert 3 <= upper.count("c") <= 9  # of 64
    assert not set("abd") & set(upper)
    assert text.count("?") == (text.count("? 8") + text.count("?8"))  # of ours, only × has no ASCII
