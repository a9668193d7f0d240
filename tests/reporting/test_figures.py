"""Figures show the numbers of the reports and of theory."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from ropecli.checkpoint.inspection import PRETRAINED
from ropecli.errors import DataError
from ropecli.reporting.figures import style
from ropecli.reporting.figures.plots import draw_frequencies, draw_lengths
from ropecli.rope import RopeGeometry
from ropecli.scaling.spec import make_spec, scale


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def names_at_ends(axes):
    """The names at the right, from the top."""
    texts = [text for text in axes.texts if text.get_position()[0] > 1]
    return [text.get_text() for text in sorted(texts, key=lambda text: -text.get_position()[1])]


def note(figure):
    return figure.get_supxlabel().replace("\n", " ")


@pytest.fixture
def reports(report):
    return [
        report(18.0, 25.0, 47.0),
        report(20.0, 19.0, 18.5, method="yarn", factor=4.0, in_memory=True),
        report(19.0, 19.5, 30.0, method="linear", factor=4.0, in_memory=True),
    ]


def drawn(*reports):
    return draw_lengths(reports)


def test_every_report_is_a_line_of_its_numbers_and_has_its_name_at_the_end(reports):
    values, _ = drawn(*reports).axes
    for report, line in zip(reports, lines(values).values(), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), report.lengths)
        np.testing.assert_array_equal(line.get_ydata(), [cell.ppl for cell in report.cells])
    assert list(lines(values)) == ["base", "yarn ×4", "linear ×4"]
    assert names_at_ends(values) == ["base", "linear ×4", "yarn ×4"]
    assert [list(line.get_xdata()) for line in values.lines if line.get_linewidth() == 1] == [[256, 256]]


def test_intervals_are_drawn_around_changes_and_not_around_values(reports):
    values, changes = drawn(*reports).axes
    assert not [line for line in values.lines if line.get_marker() == "_"]
    paired = [report.change_from(reports[0], cell.length) for report in reports[1:] for cell in report.cells]
    bars = [list(line.get_ydata()) for line in changes.lines if line.get_marker() == "_"]
    np.testing.assert_allclose(bars, [[1 + change.low, 1 + change.high] for change in paired])
    points = [y for line in list(lines(changes).values())[1:] for y in line.get_ydata()]
    np.testing.assert_allclose(points, [1 + change.change for change in paired])
    assert list(lines(changes)["base"].get_ydata()) == [1, 1]
    assert "0" in [text.get_text() for text in changes.get_yticklabels()]
    assert len(drawn(reports[0], replace(reports[1], fingerprint="2" * 64)).subfigs) == 2


def drawn_ropes(*methods, still_pairs=0):
    geometry = RopeGeometry(128, 128, 10_000.0, 4096, still_pairs=still_pairs)
    ropes = {f"{name} ×8": scale(geometry, make_spec(name, 8.0)) for name in methods}
    return draw_frequencies("folder", {PRETRAINED: scale(geometry, make_spec("none")), **ropes}, 32768)


def test_frequencies_are_ratios():
    (axes,) = drawn_ropes("linear", "ntk", "p-rope").axes
    ratios = lines(axes)
    np.testing.assert_allclose(ratios["linear ×8"].get_ydata(), np.full(64, 1 / 8))
    # b' = b·s^(d/(d-2)), so that θ'/θ = s^(-2i/(d-2))
    np.testing.assert_allclose(ratios["ntk ×8"].get_ydata(), 8.0 ** (-np.arange(64) / 63))
    assert [list(line.get_xdata()) for line in axes.lines if line.get_linestyle() == "-."] == [[45.5, 45.5]]
    assert "critical dimension 92" in note(axes.figure)
    assert ratios["1/s at factor 8: 0.125"].get_ydata()[0] == 1 / 8
    assert np.isnan(lines(axes)["p-rope ×8"].get_ydata()).sum() == 16
    assert "pairs that do not rotate: 16 of 64 (p-rope ×8)" in note(axes.figure)
    with pytest.raises(DataError, match="nothing to compare"):
        drawn_ropes()
    drawn_ropes("nope", "rerope", still_pairs=64).draw_without_rendering()


def texts(path):
    return ["".join(element.itertext()) for element in ET.parse(path).iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize("name", ["_a$\\frac{$b", "<script>alert(1)</script> &amp;"])
def test_names_are_neither_formulas_nor_markup(report, retrieval, tmp_path, name):
    first = report(18.0, 25.0, 47.0, checkpoint=name)
    other = replace(first, checkpoint="other", weights="2" * 64)
    for figure in (drawn(first, other), drawn(retrieval({(256, 0.0): 4}, checkpoint=name))):
        style.save(figure, tmp_path / "plot.svg")
        assert any(name in text for text in texts(tmp_path / "plot.svg"))
