"""Frequencies over the pretrained ones: what is drawn is the ratio, by pair, and what has none is said."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from by_pair_drawn import TWELVE, lines, printed, texts

from ropecli.errors import DataError
from ropecli.report.plots import style
from ropecli.report.study.frequencies import chart, figure
from ropecli.rope import ScaledRope, ScalingSpec

BORDER = "critical dimension 92: pairs 0 to 45 turn inside the pretraining window"


def test_every_method_is_a_line_of_its_ratios(study):
    (axes,) = figure(study("linear", "ntk", "longrope")).axes
    drawn = lines(axes)
    pairs = np.arange(64)
    by_hand = {
        "linear ×8": np.full(64, 1 / 8),
        "ntk ×8": 8.0 ** (-pairs / 63),  # b' = b·s^(d/(d-2)), so that θ'/θ = s^(-2i/(d-2))
        "longrope ×8": 1 / np.linspace(1, 8, 64),
    }
    for name, ratios in by_hand.items():
        line = drawn.pop(name)
        np.testing.assert_array_equal(line.get_xdata(), pairs)
        np.testing.assert_allclose(line.get_ydata(), ratios, rtol=1e-12)
    border = drawn.pop(BORDER)
    assert list(border.get_xdata()) == [45.5, 45.5]
    assert {name: line.get_ydata()[0] for name, line in drawn.items()} == {
        "as pretrained: 1": 1,
        "1/s at factor 8: 0.125": 1 / 8,
    }
    assert axes.get_yscale() == "log"


def test_each_factor_has_its_line_as_long_as_they_are_few(study):
    levels = [name for name in lines(figure(study("linear*2", "yarn*4", "rerope*16")).axes[0]) if "1/s" in name]
    assert levels == ["1/s at factor 2: 0.5", "1/s at factor 4: 0.25"]  # rerope divides nothing
    many = figure(study(*(f"yarn*{factor}" for factor in range(2, 7))))
    assert not [name for name in lines(many.axes[0]) if "1/s" in name]
    assert "1/s is not marked for more than 4 factors" in many.get_supxlabel()


def test_zeros_stand_below_the_axis_and_are_said(study):
    of = study("yarn", "p-rope", "nope")
    drawn = figure(of)
    (axes,) = drawn.axes
    rows = [line for line in axes.lines if line.get_label() == "_0"]
    for row, name in zip(rows, ("p-rope ×8", "nope ×8"), strict=True):
        np.testing.assert_array_equal(np.isfinite(row.get_ydata()), of.ropes[name].inv_freq == 0)
        np.testing.assert_array_equal(np.isnan(lines(axes)[name].get_ydata()), of.ropes[name].inv_freq == 0)
    heights = [np.nanmin(row.get_ydata()) for row in rows]
    assert 1 / 8 > heights[0] > heights[1] > axes.get_ylim()[0]
    names = [one.get_text() for one in axes.get_yticklabels()]
    assert heights[0] > axes.get_yticks()[names.index("0")] > heights[1]
    assert min(float(tick) for tick, name in zip(axes.get_yticks(), names, strict=True) if name != "0") >= 1 / 8 / 1.01
    assert "shown at 0: 16 of 64 pairs of p-rope ×8, 64 of 64 pairs of nope ×8" in drawn.get_supxlabel()


def test_still_pairs_are_left_out_and_said(study):
    of = study("linear", "nope", still_pairs=16)
    turning = ScaledRope(of.geometry, ScalingSpec("custom", 8.0), np.ones(64))
    drawn = figure(replace(of, ropes={**of.ropes, "custom ×8": turning}))
    assert np.isnan(lines(drawn.axes[0])["custom ×8"].get_ydata()[48:]).all()
    ratios = lines(drawn.axes[0])["linear ×8"].get_ydata()
    np.testing.assert_allclose(ratios[:48], 1 / 8)
    assert np.isnan(ratios[48:]).all()
    (zeros,) = [line.get_ydata() for line in drawn.axes[0].lines if line.get_label() == "_0"]
    assert list(np.flatnonzero(np.isfinite(zeros))) == list(range(48))
    assert "pairs from 48 on did not turn in pretraining" in drawn.get_supxlabel()
    assert "pairs of linear" not in drawn.get_supxlabel()


def test_methods_that_change_distances_stand_at_one(study):
    drawn = figure(study("rerope"))
    np.testing.assert_array_equal(lines(drawn.axes[0])["rerope ×8"].get_ydata(), np.ones(64))
    assert "rerope ×8 changes distances and no frequency: the line stands at 1" in drawn.get_supxlabel()


@pytest.mark.parametrize(
    ("window", "head_dim", "expected"),
    [
        (10**6, 128, "every pair that turns completes a turn"),
        (6, 128, "no pair completes a turn"),
        (7, 128, "pair 0 turns"),
    ],
)
def test_where_all_or_none_turn_inside_the_window(study, window, head_dim, expected):
    drawn = figure(study("linear", window=window, head_dim=head_dim))
    assert expected in drawn.get_supxlabel() + " ".join(lines(drawn.axes[0]))
    assert any("critical" in name for name in lines(drawn.axes[0])) == ("pair 0" in expected)


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


def test_nothing_to_compare_and_too_many_are_refused(study):
    with pytest.raises(DataError, match="nothing to compare: folder turns as it was pretrained"):
        figure(study())
    with pytest.raises(DataError, match="No pair of folder turned in pretraining"):
        chart(study("nope", still_pairs=64))
    figure(study(*(f"linear*{factor}" for factor in range(2, style.MOST_LINES + 2))))
    with pytest.raises(DataError, match="45 lines are too many"):
        figure(study(*(f"linear*{factor}" for factor in range(2, style.MOST_LINES + 3))))


def test_an_svg_names_what_it_shows(study, tmp_path):
    style.save(figure(study("yarn", "p-rope")), tmp_path / "plot.svg")
    found = ["".join(one.itertext()) for one in ET.parse(tmp_path / "plot.svg").iter() if one.tag.endswith("}text")]
    assert {"yarn ×8", "p-rope ×8", "as pretrained: 1", "1/s at factor 8: 0.125", "0"} <= set(found)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_terminal_has_the_same(study, width, encoding):
    text = printed(chart(study("linear", "yarn", "nope")), width, encoding)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.replace("?", "×").split())
    for part in ("a linear ×8: 0.125 at pair 63", "b yarn ×8: 0.125 at pair 63", "c nope ×8: 0 at pair 63"):
        assert part in flat
    assert BORDER in flat
    assert "1/s at factor 8: 0.125" in flat
    rows = [line for line in text.splitlines() if "│" in line or "┼" in line or "|" in line or "+" in line]
    assert rows[0].lstrip().startswith("1")
    assert "b" in rows[0]
    assert rows[17].lstrip().startswith("0")
    assert 3 <= rows[17].count("c") <= 9  # of 64
    assert not set("ab") & set(rows[17])
