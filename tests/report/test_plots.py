"""Plots hold the reports' lines, and are there whole or not at all."""

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from ropecli.errors import OutputError
from ropecli.report.plots import plot_perplexity


@pytest.fixture
def reports(report):
    return [
        report(18.0, 25.0, 47.0),
        report(20.0, 19.0, 18.5, method="yarn", factor=4.0),
        report(19.0, 19.5, 30.0, method="linear", factor=4.0),
    ]


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, as they were when closed."""
    import matplotlib.pyplot as plt

    closed = []
    monkeypatch.setattr(plt, "close", closed.append)
    return closed


def test_every_report_is_a_line_of_its_numbers(reports, figures, tmp_path):
    plot_perplexity(reports, tmp_path / "plot.png", original_window=256)
    (axes,) = figures[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    for one in reports:
        line = lines.pop(one.label)
        np.testing.assert_array_equal(line.get_xdata(), [row.length for row in one.rows])
        np.testing.assert_array_equal(line.get_ydata(), [row.ppl for row in one.rows])
    assert [list(line.get_xdata()) for line in lines.values()] == [[256, 256]]  # the window
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert {text.get_text() for text in axes.get_legend().get_texts()} >= {one.label for one in reports}


def test_no_two_lines_look_alike_in_black_and_white(report, figures, tmp_path):
    many = [report(18.0 + index, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(12)]
    plot_perplexity(many, tmp_path / "plot.png")
    looks = {(line.get_marker(), line.get_linestyle()) for line in figures[0].axes[0].lines}
    assert len(looks) == 12


def test_a_png_is_a_picture(reports, tmp_path):
    import matplotlib.image

    plot_perplexity(reports, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture = matplotlib.image.imread(tmp_path / "new" / "plot.png")
    assert min(picture.shape[:2]) > 400
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plot.png"]


def test_an_svg_names_its_lines(reports, tmp_path):
    plot_perplexity(reports, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert ET.fromstring(text).tag.endswith("svg")
    assert all(one.label in text for one in reports)


@pytest.mark.parametrize("name", ["plot.docx", "plot", "plot.", ".png"])
def test_an_ending_that_is_no_picture_is_refused(reports, tmp_path, name):
    with pytest.raises(OutputError):
        plot_perplexity(reports, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(reports, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        plot_perplexity(reports, tmp_path / "file" / "plot.png")
    (tmp_path / "plot.png").mkdir()
    with pytest.raises(OutputError):
        plot_perplexity(reports, tmp_path / "plot.png")


@pytest.mark.parametrize("name", ["costs $5 and $6_", "a$\\frac{$b"])
def test_names_are_no_formulas(report, tmp_path, name):
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):  # letters stay letters
        plot_perplexity([report(18.0, 25.0, 47.0, checkpoint=name, source=name)], tmp_path / "plot.svg")
    drawn = [element.text for element in ET.parse(tmp_path / "plot.svg").iter() if element.tag.endswith("}text")]
    assert f"{name}, protocol prefix, data {name}" in drawn
