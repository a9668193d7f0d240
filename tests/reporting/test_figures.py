"""Figures show the numbers of the reports and of theory."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from ropecli.checkpoint.inspection import PRETRAINED, Study
from ropecli.errors import DataError
from ropecli.reporting.figures import style
from ropecli.reporting.figures.report_plots import REPORT_KINDS, choose_kind
from ropecli.reporting.figures.study_plots import STUDY_KINDS
from ropecli.reporting.lines import best_of, sets_of
from ropecli.rope import RopeGeometry
from ropecli.scaling.scale import scale
from ropecli.scaling.spec import make_spec


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def legend(axes):
    return [text.get_text().replace("\n", " ") for text in axes.get_legend().get_texts()]


def note(figure):
    return figure.get_supxlabel().replace("\n", " ")


@pytest.fixture
def reports(report):
    return [
        report(18.0, 25.0, 47.0),
        report(20.0, 19.0, 18.5, method="yarn", factor=4.0),
        report(19.0, 19.5, 30.0, method="linear", factor=4.0),
    ]


def drawn(kind, *reports):
    return REPORT_KINDS[kind](reports)


def test_every_report_is_a_line_of_its_numbers(reports):
    (axes,) = drawn("perplexity", *reports).axes
    drawn_lines = lines(axes)
    for report in reports:
        line = drawn_lines.pop(report.label)
        np.testing.assert_array_equal(line.get_xdata(), report.lengths)
        np.testing.assert_array_equal(line.get_ydata(), [cell.ppl for cell in report.cells])
    assert list(drawn_lines.pop("pretraining length (256)").get_xdata()) == [256, 256]
    assert not drawn_lines
    assert legend(axes) == ["none", "linear ×4", "yarn ×4", "pretraining length (256)"]


def whiskers(axes):
    return sorted(sorted(line.get_ydata()) for line in axes.lines if line.get_marker() == "_")


def test_whiskers_are_of_the_document_or_of_the_paired_difference(reports):
    figure = drawn("perplexity", reports[0])
    assert whiskers(figure.axes[0]) == [[cell.low, cell.high] for cell in reports[0].cells]
    assert "95% interval over documents" in note(figure)
    figure, first = drawn("perplexity", *reports), reports[0]
    changes = [(cell, report.change_from(first, cell.length)) for report in reports[1:] for cell in first.cells]
    spans = sorted([cell.ppl * (1 + change.low), cell.ppl * (1 + change.high)] for cell, change in changes)
    np.testing.assert_allclose(whiskers(figure.axes[0]), spans)
    assert "paired 95% interval of the difference from none" in note(figure)


def test_a_comparison_has_a_panel_for_each_length_and_a_row_for_each_report(reports):
    figure = drawn("comparison", *reports)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["none", "yarn ×4", "linear ×4"]
    lines, first = sets_of(reports)[0], reports[0]
    for index, axes in enumerate(figure.axes):
        dots = [line for line in axes.lines if line.get_marker() == "o"]
        values, length = [report.cells[index].ppl for report in reports], first.lengths[index]
        assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == list(zip(values, range(3), strict=True))
        filled = {place for place, dot in enumerate(dots) if dot.get_markerfacecolor() != "white"}
        assert filled == best_of(lines, length)
        bars = [bar.get_segments()[0][:, 0] for bar in axes.collections]
        change = reports[1].change_from(first, length)
        np.testing.assert_allclose(bars[1], [values[0] * (1 + change.low), values[0] * (1 + change.high)])
        assert axes.texts[1].get_text() == f"{values[1]:.2f} ({100 * change.change:+.1f}%)"
    assert len(drawn("comparison", reports[0], replace(reports[1], fingerprint="2" * 64)).subfigs) == 2


def test_a_heat_map_holds_the_numbers(retrieval):
    hits = {(256, 0.0): 4, (256, 0.5): 3, (512, 0.0): 1}  # and none at 512, 0.5
    ruler = retrieval({(256, "vt"): 2, (256, "cwe"): 3}, task="ruler")
    figure = drawn("scores", retrieval(hits), *[retrieval({(256, 0.0): 0})] * 2, ruler)
    panels = [axes for axes in figure.axes if axes.images]
    np.testing.assert_array_equal(panels[0].images[0].get_array().filled(-1), [[100, 25], [75, -1], [87.5, 25]])
    assert [text.get_text() for text in panels[0].texts] == ["100", "25", "75", "88", "25"]
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["0", "0.5", "mean"]
    assert [text.get_text() for text in panels[3].get_yticklabels()] == ["vt", "cwe", "mean"]
    titles = [axes.get_title().replace("\n", " ") for axes in panels]
    assert titles == [f"folder, none, {name}" for name in ("passkey", "passkey (2)", "passkey (3)", "RULER")]
    assert "folder, none, RULER: Effective length: at least 256 tokens" in note(figure)


def study_of(*methods, still_pairs=0):
    geometry = RopeGeometry(128, 128, 10_000.0, 4096, still_pairs=still_pairs)
    ropes = {f"{name} ×8": scale(geometry, make_spec(name, 8.0)) for name in methods}
    return Study("folder", 32768, {PRETRAINED: scale(geometry, make_spec("none")), **ropes})


def test_frequencies_are_ratios():
    draw = STUDY_KINDS["frequencies"]
    (axes,) = draw(study_of("linear", "ntk", "p-rope")).axes
    ratios = lines(axes)
    np.testing.assert_allclose(ratios["linear ×8"].get_ydata(), np.full(64, 1 / 8))
    # b' = b·s^(d/(d-2)), so that θ'/θ = s^(-2i/(d-2))
    np.testing.assert_allclose(ratios["ntk ×8"].get_ydata(), 8.0 ** (-np.arange(64) / 63))
    border = ratios["critical dimension 92: the pairs before it complete a rotation inside the pretraining length"]
    assert list(border.get_xdata()) == [45.5, 45.5]
    assert ratios["1/s at factor 8: 0.125"].get_ydata()[0] == 1 / 8
    assert np.isnan(lines(axes)["p-rope ×8"].get_ydata()).sum() == 16
    assert "pairs that do not rotate: 16 of 64 (p-rope ×8)" in note(axes.figure)
    with pytest.raises(DataError, match="nothing to compare"):
        draw(study_of())
    draw(study_of("nope", "rerope", still_pairs=64)).draw_without_rendering()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_decay_is_the_mean_score_of_adjacent_distances():
    (axes,) = STUDY_KINDS["decay"](study_of("yarn", "lm-infinite")).axes
    theta = 10_000.0 ** (-np.arange(64) / 64)
    scores = 2 * np.cos(np.outer(np.arange(32768), theta)).sum(axis=1)
    drawn_lines = lines(axes)
    means = drawn_lines[f"pretrained: first negative at {np.argmax(scores < 0)}"].get_ydata()
    np.testing.assert_allclose(means[:119], scores[: 119 * 274].reshape(119, 274).mean(axis=1), rtol=1e-9)
    assert "yarn ×8: first negative at 8886" in drawn_lines
    assert np.ma.is_masked(drawn_lines["lm-infinite ×8"].get_ydata())
    assert list(drawn_lines["pretraining length (4096)"].get_xdata()) == [4096, 4096]
    STUDY_KINDS["decay"](study_of("nope", still_pairs=64)).draw_without_rendering()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_strange_numbers_are_drawn(report, retrieval):
    wide = [report(1e100, 0.99, 1e6), report(15.0, 1.0, 6.0125, method="yarn", factor=4.0)]
    hits = {"ntk": 0, "yarn": 39}
    scores = [retrieval({(256, 0.0): 38, (512, 0.0): hits[name]}, trials=40, method=name) for name in hits]
    for figure in (
        drawn("perplexity", *wide),
        drawn("comparison", *wide),
        drawn("comparison", *scores),
    ):
        figure.draw_without_rendering()


def texts(path):
    return ["".join(element.itertext()) for element in ET.parse(path).iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize("name", ["_a$\\frac{$b", "<script>alert(1)</script> &amp;"])
def test_names_are_neither_formulas_nor_markup(report, retrieval, tmp_path, name):
    first = report(18.0, 25.0, 47.0, checkpoint=name)
    other = replace(first, checkpoint="other", digest="2" * 64)
    figures = [drawn("perplexity", first, other), drawn("comparison", first, other)]
    for figure in [*figures, drawn("scores", retrieval({(256, 0.0): 4}, checkpoint=name))]:
        style.save(figure, tmp_path / "plot.svg")
        assert any(text.strip() in (name, f"{name}, none") for text in texts(tmp_path / "plot.svg"))


def test_the_default_kind_follows_from_the_reports(report, retrieval, tuning):
    many = [report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(9)]
    assert choose_kind(many[:2]) is REPORT_KINDS["perplexity"]
    assert choose_kind(many) is REPORT_KINDS["comparison"]
    assert choose_kind([retrieval({(256, 0.0): 4})]) is REPORT_KINDS["scores"]
    with pytest.raises(DataError, match="cannot show the tune report"):
        choose_kind([many[0], tuning("grid")])
