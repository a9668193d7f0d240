"""Figures show the numbers of the reports and of theory, are legible without colour, and texts do not overlap."""

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from ropecli.errors import DataError
from ropecli.reporting.figures import style
from ropecli.reporting.lines import BITS_PER_BYTE, PPL, best_of, sets_of
from ropecli.reporting.plot_kinds import KINDS, STUDY_KINDS, choose_kind


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


def drawn(kind, *reports, metric=None):
    return KINDS[kind].figure(reports, *([metric] if metric else []))


def test_every_report_is_a_line_of_its_numbers(reports):
    (axes,) = drawn("perplexity", *reports).axes
    found = lines(axes)
    for report in reports:
        line = found.pop(report.label)
        np.testing.assert_array_equal(line.get_xdata(), report.lengths)
        np.testing.assert_array_equal(line.get_ydata(), [cell.ppl for cell in report.cells])
    assert {name: list(line.get_xdata()) for name, line in found.items()} == {"pretraining length (256)": [256, 256]}
    assert axes.get_xscale() == axes.get_yscale() == "log"
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


def test_bits_per_byte(reports):
    (axes,) = drawn("perplexity", *reports, metric=BITS_PER_BYTE).axes
    np.testing.assert_allclose(lines(axes)["none"].get_ydata(), np.log2([18.0, 25.0, 47.0]) / 3)
    assert "bits per byte" in axes.get_ylabel()
    # other tokens of the same text
    figure = drawn("perplexity", reports[0], replace(reports[1], fingerprint="2" * 64), metric=BITS_PER_BYTE)
    assert len(figure.axes) == 1
    assert "different tokenizers" in note(figure)
    without = replace(reports[0], cells=[replace(cell, bits_per_byte=None) for cell in reports[0].cells])
    with pytest.raises(DataError, match="no bits-per-byte"):
        drawn("perplexity", without, metric=BITS_PER_BYTE)


@pytest.mark.parametrize("kind", ["perplexity", "comparison"])
@pytest.mark.parametrize("other", [{"task": "tail"}, {"fingerprint": "2" * 64, "source": "books"}], ids=str)
def test_each_set_of_data_has_axes_of_its_own(reports, kind, other):
    figure = drawn(kind, reports[0], replace(reports[1], **other))
    first, second = figure.subfigs
    assert len(first.axes) == len(second.axes) == len(figure.axes) / 2
    assert "protocol prefix, data demo, 4 documents" in first.get_suptitle().replace("\n", " ")
    assert set(other.values()) & set(re.split(r"[,\s]+", second.get_suptitle()))


def test_a_comparison_has_a_panel_for_each_length_and_a_row_for_each_report(reports, report):
    figure = drawn("comparison", *reports)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["none", "yarn ×4", "linear ×4"]
    lines, first = sets_of(reports)[0], reports[0]
    for index, axes in enumerate(figure.axes):
        dots = [line for line in axes.lines if line.get_marker() == "o"]
        values, length = [report.cells[index].ppl for report in reports], first.lengths[index]
        assert [(dot.get_xdata()[0], dot.get_ydata()[0]) for dot in dots] == list(zip(values, range(3), strict=True))
        filled = {place for place, dot in enumerate(dots) if dot.get_markerfacecolor() != "white"}
        assert filled == best_of(lines, length, PPL)
        bars = [bar.get_segments()[0][:, 0] for bar in axes.collections]
        change = reports[1].change_from(first, length)
        np.testing.assert_allclose(bars[1], [values[0] * (1 + change.low), values[0] * (1 + change.high)])
        assert axes.texts[1].get_text() == f"{values[1]:.2f} ({100 * change.change:+.1f}%)"
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "256 tokens",
        "512 tokens\nbeyond the pretraining length",
        "1024 tokens\nbeyond the pretraining length",
    ]
    with pytest.raises(DataError, match="too many"):
        drawn("comparison", *[report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(151)])


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
    assert any(list(line.get_xdata()) == [0.5, 0.5] for line in panels[0].lines)  # the window lies between
    assert "folder, none, RULER: Effective length: at least 256 tokens" in note(figure)


def test_every_measurement_of_a_tuning_stands_at_its_cost_and_its_perplexities(tuning):
    run = tuning("heads")
    spent = np.cumsum([point.seconds for point in run.points])
    for axes, at in zip(drawn("tuning", run).axes, ("target", "pretraining"), strict=True):
        found = lines(axes)
        values = np.exp([getattr(point.score, at) for point in run.points])
        for level, documents in (("grid", 4), ("grid", 16), ("heads", 16)):
            keys = [(point.level, point.score.documents) for point in run.points]
            own = [index for index, key in enumerate(keys) if key == (level, documents)]
            line = found[f"{level}, {documents} documents"]
            np.testing.assert_allclose(line.get_xdata(), spent[own])
            np.testing.assert_allclose(line.get_ydata(), values[own])
            assert (line.get_markerfacecolor() == "white") == (documents < 16)
        best = found["best so far, on 16 documents"]
        objectives = [point.score.objective if point.score.documents == 16 else math.inf for point in run.points]
        lowest = np.minimum.accumulate(objectives)
        kept = [index for index, one in enumerate(objectives) if one == lowest[index] < math.inf]
        np.testing.assert_allclose(best.get_ydata()[:-1], values[kept])
        np.testing.assert_allclose(best.get_xdata()[:-1], spent[kept])


def test_frequencies_are_ratios(study):
    (axes,) = STUDY_KINDS["frequencies"](study("linear", "ntk", "p-rope")).axes
    found = lines(axes)
    np.testing.assert_allclose(found["linear ×8"].get_ydata(), np.full(64, 1 / 8))
    # b' = b·s^(d/(d-2)), so that θ'/θ = s^(-2i/(d-2))
    np.testing.assert_allclose(found["ntk ×8"].get_ydata(), 8.0 ** (-np.arange(64) / 63))
    border = found["critical dimension 92: pairs 0 to 45 complete a rotation inside the pretraining length"]
    assert list(border.get_xdata()) == [45.5, 45.5]
    assert found["1/s at factor 8: 0.125"].get_ydata()[0] == 1 / 8
    # 0 is drawn below the logarithmic axis
    (zeros,) = [line.get_ydata() for line in axes.lines if line.get_label() == style.UNNAMED]
    np.testing.assert_array_equal(np.isfinite(zeros), np.arange(64) >= 48)
    assert axes.get_ylim()[0] < np.nanmax(zeros) < 1 / 8
    assert axes.get_yticklabels()[-1].get_text() == "0"
    with pytest.raises(DataError, match="nothing to compare"):
        STUDY_KINDS["frequencies"](study())
    with pytest.raises(DataError, match="No pair of folder rotated"):
        STUDY_KINDS["frequencies"](study("nope", still_pairs=64))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("kind", STUDY_KINDS)
def test_strange_methods_are_drawn(study, kind):
    made = study("linear", "p-rope", "nope", "rerope", rotary_dim=64, rope_theta=5e5, window=8192)
    STUDY_KINDS[kind](made).draw_without_rendering()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_strange_numbers_are_drawn(report, retrieval, tuning):
    wide = [report(1e100, 0.99, 1e6), report(15.0, 1.0, 6.0125, method="yarn", factor=4.0)]
    scores = [retrieval({(256, 0.0): 38, (512, 0.0): hits}, trials=40, method=f"method-{hits}") for hits in (0, 39)]
    for figure in (
        drawn("perplexity", *wide),
        drawn("comparison", *wide),
        drawn("comparison", *scores),
        drawn("tuning", tuning("search", points=400)),
    ):
        figure.draw_without_rendering()


def texts(path):
    return ["".join(element.itertext()) for element in ET.parse(path).iter() if element.tag.endswith("}text")]


@pytest.mark.parametrize("name", ["costs $5 and $6_", "_a$\\frac{$b", "<script>alert(1)</script> &amp;"])
def test_names_are_no_formulas_and_no_markup(report, retrieval, tmp_path, name):
    one = report(18.0, 25.0, 47.0, checkpoint=name)
    other = replace(one, checkpoint="other", digest="2" * 64)
    figures = [drawn("perplexity", one, other), drawn("comparison", one, other)]
    for figure in [*figures, drawn("scores", retrieval({(256, 0.0): 4}, checkpoint=name))]:
        style.save(figure, tmp_path / "plot.svg")
        assert any(text.strip() in (name, f"{name}, none") for text in texts(tmp_path / "plot.svg"))


def test_the_kind_that_suits_is_chosen(report, retrieval, tuning):
    many = [report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(9)]
    assert choose_kind(many[:2]) is KINDS["perplexity"]
    assert choose_kind(many) is KINDS["comparison"]
    assert choose_kind([retrieval({(256, 0.0): 4})]) is KINDS["scores"]
    assert choose_kind([tuning("grid")]) is KINDS["tuning"]
    with pytest.raises(DataError, match="different kinds"):
        choose_kind([many[0], tuning("grid")])
