"""Plots hold the reports' numbers, look different without colour, and are there whole or not at all."""

import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from ropecli.errors import DataError, OutputError
from ropecli.report.metrics import METRICS
from ropecli.report.plots import draw_report_plot
from ropecli.report.plots.comparison import draw_comparison
from ropecli.report.plots.context import draw_context
from ropecli.report.plots.perplexity import draw_perplexity
from ropecli.report.plots.retrieval import draw_retrieval

PPL = METRICS["ppl"]


@pytest.fixture
def reports(report):
    return [
        report(18.0, 25.0, 47.0),
        report(20.0, 19.0, 18.5, method="yarn", factor=4.0),
        report(19.0, 19.5, 30.0, method="linear", factor=4.0),
    ]


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def texts(path):
    return ["".join(element.itertext()) for element in ET.parse(path).iter() if element.tag.endswith("}text")]


def test_every_report_is_a_line_of_its_numbers(reports):
    (axes,) = draw_perplexity(reports, PPL).axes
    drawn = lines(axes)
    for one in reports:
        line = drawn.pop(one.label)
        np.testing.assert_array_equal(line.get_xdata(), [row.length for row in one.rows])
        np.testing.assert_array_equal(line.get_ydata(), [row.ppl for row in one.rows])
    assert {name: list(line.get_xdata()) for name, line in drawn.items()} == {"pretraining window (256)": [256, 256]}
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert "tokens" in axes.get_xlabel()
    assert "perplexity" in axes.get_ylabel()
    assert list(axes.get_xticks()) == [256, 512, 1024]
    assert len(axes.get_yticks()) > 2


def test_the_legend_follows_the_lines_ends(reports):
    legend = draw_perplexity(reports, PPL).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == [
        "none",
        "linear ×4",
        "yarn ×4",
        "pretraining window (256)",
    ]


def test_the_interval_is_drawn_where_there_is_one(reports):
    bare = replace(reports[0], rows=[replace(row, ppl_low=None, ppl_high=None) for row in reports[0].rows])
    assert not draw_perplexity([bare], PPL).axes[0].collections
    (axes,) = draw_perplexity(reports[:1], PPL).axes
    segments = axes.collections[0].get_segments()
    np.testing.assert_allclose(
        [(line[0][0], line[0][1], line[1][1]) for line in segments],
        [(row.length, row.ppl_low, row.ppl_high) for row in reports[0].rows],
    )


def test_no_two_lines_look_alike_in_black_and_white(report):
    many = [report(18.0 + index, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(40)]
    drawn = draw_perplexity(many, PPL).axes[0].lines
    looks = {(line.get_marker(), line.get_linestyle()) for line in drawn if line.get_label().startswith("linear")}
    assert len(looks) == 40


def test_a_baseline_is_a_line_of_its_own_and_drawn_once(with_baseline):
    other = replace(with_baseline, method="linear")
    drawn = lines(draw_perplexity([with_baseline, other], PPL).axes[0])
    base = drawn.pop("baseline: base, none")
    np.testing.assert_array_equal(base.get_ydata(), [18.0, 25.0, 47.0])
    assert set(drawn) == {"extended, yarn ×4", "extended, linear ×4", "pretraining window (256)"}


def test_bits_per_byte(reports):
    (axes,) = draw_perplexity(reports, METRICS["bits-per-byte"]).axes
    np.testing.assert_allclose(lines(axes)["none"].get_ydata(), np.log2([18.0, 25.0, 47.0]) / 3)
    assert "bits per byte" in axes.get_ylabel()
    without = replace(reports[0], rows=[replace(row, bits_per_byte=None) for row in reports[0].rows])
    with pytest.raises(DataError, match="no bits-per-byte"):
        draw_perplexity([without], METRICS["bits-per-byte"])


@pytest.mark.parametrize("draw", [draw_perplexity, draw_comparison, lambda reports, metric: draw_context(reports)])
def test_protocols_are_not_mixed(reports, draw):
    with pytest.raises(DataError, match=r"prefix, tail.*one protocol at a time"):
        draw([reports[0], replace(reports[1], protocol="tail")], PPL)


@pytest.mark.parametrize("draw", [draw_perplexity, draw_comparison, lambda reports, metric: draw_context(reports)])
def test_other_data_are_named_and_warned_of(reports, draw):
    figure = draw([reports[0], replace(reports[1], fingerprint="2" * 64, source="books")], PPL)
    assert "different data" in figure.get_supxlabel()
    assert "2 sources" in figure.get_suptitle()
    assert "different data" not in draw(reports, PPL).get_supxlabel()


def test_yarns_protocol_is_marked(reports):
    figure = draw_perplexity([replace(reports[0], protocol="yarn")], PPL)
    assert "unweighted window means" in figure.get_suptitle().replace("\n", " ")


def test_the_loss_by_context(reports):
    (axes,) = draw_context(reports).axes
    for one in reports:
        line = lines(axes)[one.label]
        np.testing.assert_allclose(line.get_xdata(), [1, 2, np.sqrt(64 * 95)])
        np.testing.assert_array_equal(line.get_ydata(), [bucket.nll for bucket in one.rows[-1].by_context])
    assert axes.get_xscale() == "log"
    assert "nats" in axes.get_ylabel()
    with pytest.raises(DataError, match="no loss by context"):
        draw_context([replace(reports[0], rows=[replace(row, by_context=()) for row in reports[0].rows])])


def test_a_comparison_has_a_panel_a_length_and_a_row_a_report(reports):
    figure = draw_comparison(reports, PPL)
    assert len(figure.axes) == 3
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["none", "yarn ×4", "linear ×4"]
    for index, axes in enumerate(figure.axes):
        dots = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "o"]
        assert dots == [(one.rows[index].ppl, place) for place, one in enumerate(reports)]
        filled = [line.get_markerfacecolor() != "white" for line in axes.lines if line.get_marker() == "o"]
        assert [one.rows[index].ppl for one, best in zip(reports, filled, strict=True) if best] == [
            min(one.rows[index].ppl for one in reports)
        ]
    assert [axes.get_title() for axes in figure.axes][1:] == [
        "512 tokens\nbeyond the window",
        "1024 tokens\nbeyond the window",
    ]


def test_rows_of_a_comparison_stand_apart_however_many(report):
    many = [report(18.0 + index, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(17)]
    figure = draw_comparison(many, PPL)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_yticklabels()]
    assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))
    with pytest.raises(DataError, match="too many"):
        draw_comparison([report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(151)], PPL)


def test_a_heat_map_holds_the_numbers(retrieval):
    hits = {(256, 0.0): 4, (256, 0.5): 3, (512, 0.0): 1}  # and none at 512, 0.5
    figure = draw_retrieval([retrieval(hits), retrieval({(256, 0.0): 0})])
    panels = [axes for axes in figure.axes if axes.images]
    np.testing.assert_array_equal(panels[0].images[0].get_array().filled(-1), [[100, 25], [75, -1]])
    assert [text.get_text() for text in panels[0].texts] == ["100", "25", "75"]
    assert panels[0].images[0].get_clim() == (0, 100)
    assert [axes.get_title() for axes in panels] == ["folder, none", "folder, none (2)"]
    assert any(list(line.get_xdata()) == [0.5, 0.5] for line in panels[0].lines)  # the window lies between
    assert "a guess finds 10%" in figure.get_suptitle().replace("\n", " ")


def test_every_number_of_a_heat_map_stands_out_from_its_cell(retrieval):
    from matplotlib.colors import to_rgb

    def luminance(colour):
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
        return np.dot(linear, (0.2126, 0.7152, 0.0722))

    hits = {(256, depth): count for count, depth in enumerate((0.0, 0.25, 0.5, 0.75, 1.0))}
    axes = draw_retrieval([retrieval(hits)]).axes[0]
    for text, grey in zip(axes.texts, axes.images[0].to_rgba(axes.images[0].get_array())[:, 0], strict=True):
        light, dark = sorted((luminance(text.get_color()), luminance(grey[:3])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) > 4.5


def test_a_png_is_a_picture(reports, tmp_path):
    import matplotlib.image

    draw_report_plot(reports, tmp_path / "new" / "plot.png", kind="perplexity")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert min(matplotlib.image.imread(tmp_path / "new" / "plot.png").shape[:2]) > 400
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["plot.png"]


def test_an_svg_names_its_lines_and_is_the_same_each_time(reports, tmp_path):
    for name in ("a.svg", "b.svg"):
        draw_report_plot(reports, tmp_path / name, kind="perplexity")
    assert {one.label for one in reports} <= set(texts(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf", ".PNG"])
def test_every_kind_can_be_written(reports, retrieval, tmp_path, ending):
    draw_report_plot(reports, tmp_path / f"comparison{ending}", kind="comparison")
    draw_report_plot(reports, tmp_path / f"context{ending}", kind="context")
    draw_report_plot([retrieval({(256, 0.0): 4})], tmp_path / f"retrieval{ending}")
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("name", ["plot.docx", "plot", "plot.", ".png"])
def test_an_ending_that_is_no_picture_is_refused(reports, tmp_path, name):
    with pytest.raises(OutputError):
        draw_report_plot(reports, tmp_path / name, kind="perplexity")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused(reports, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        draw_report_plot(reports, tmp_path / "file" / "plot.png", kind="perplexity")
    (tmp_path / "plot.png").mkdir()
    with pytest.raises(OutputError):
        draw_report_plot(reports, tmp_path / "plot.png", kind="perplexity")


@pytest.mark.parametrize(
    "name", ["costs $5 and $6_", "a$\\frac{$b", "_hidden", "<script>alert(1)</script>", "名前 &amp;"]
)
def test_names_are_no_formulas_and_no_markup(report, retrieval, tmp_path, name):
    one = report(18.0, 25.0, 47.0, checkpoint=name, source=name)
    draw_report_plot([one, replace(one, checkpoint="other")], tmp_path / "lines.svg", kind="perplexity")
    assert name in [text.strip() for text in texts(tmp_path / "lines.svg")]
    draw_report_plot([one], tmp_path / "one.svg", kind="perplexity")
    assert f"{name}, protocol prefix, data {name}" in texts(tmp_path / "one.svg")
    others = [one, replace(one, checkpoint="other", digest="2" * 64)]
    draw_report_plot(others, tmp_path / "comparison.svg", kind="comparison")
    assert name in texts(tmp_path / "comparison.svg")
    draw_report_plot([retrieval({(256, 0.0): 4}, checkpoint=name)], tmp_path / "retrieval.svg")
    assert f"{name}, none" in texts(tmp_path / "retrieval.svg")


def test_what_xml_has_not_is_drawn_as_a_replacement(report, tmp_path):
    draw_report_plot(
        [report(18.0, 25.0, 47.0, checkpoint="a\x00\x1b[31m\u202eb\ud800")], tmp_path / "plot.svg", kind="perplexity"
    )
    assert "a��[31m�b�, protocol prefix, data demo" in texts(tmp_path / "plot.svg")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("ppls", [(1e300, 0.99, 1.0), (1.0, 1.0, 1.0), (1.0000001, 1.0, 1.0)])
def test_extreme_numbers_can_be_drawn(report, tmp_path, ppls):
    draw_report_plot([report(*ppls)], tmp_path / "plot.svg", kind="perplexity")
    both = [report(*ppls), report(*ppls, method="yarn", factor=2.0)]
    draw_report_plot(both, tmp_path / "comparison.svg", kind="comparison")
    assert len(list(tmp_path.iterdir())) == 2


def no_texts_touch(figure, found):
    figure.draw_without_rendering()
    boxes = [text.get_window_extent().padded(3) for text in found if text.get_text()]
    return len(boxes) > 1 and not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_close_lengths_have_ticks_and_no_numbers_that_touch(report):
    lengths = (256, 512, 1024, 2048, 3000, 3900, 4000, 4096, 4200, 8192, 16000, 16384)
    one = report(18.0, 25.0, 47.0)
    figure = draw_perplexity([replace(one, rows=[replace(one.rows[0], length=length) for length in lengths])], PPL)
    (axes,) = figure.axes
    assert no_texts_touch(figure, axes.get_xticklabels())
    assert sorted([*axes.get_xticks(), *axes.get_xticks(minor=True)]) == list(lengths)


@pytest.mark.parametrize("ppls", [(6.012, 6.013, 6.0125), (10.001, 10.002, 10.002), (11.0, 15.0, 18.0)])
def test_ticks_of_near_values_are_several_apart_and_different(report, ppls):
    one = report(*ppls)
    bare = replace(one, rows=[replace(row, ppl_low=None, ppl_high=None) for row in one.rows])
    figure = draw_perplexity([bare], PPL)
    labels = figure.axes[0].get_yticklabels()
    assert no_texts_touch(figure, labels)
    assert len({label.get_text() for label in labels}) == len(labels) >= 4
    assert figure.axes[0].get_ylabel().endswith(", logarithmic")


def test_a_distant_window_is_a_note_and_does_not_squeeze_the_data(reports):
    figure = draw_perplexity([replace(one, original_max_position_embeddings=2**17) for one in reports], PPL)
    assert "all lengths lie inside the window of 131072 tokens" in figure.get_supxlabel()
    assert figure.axes[0].get_xlim()[1] < 1200


def test_a_heat_map_names_what_it_draws(retrieval):
    beyond = draw_retrieval([retrieval({(512, 0.0): 4, (512, 0.999): 1, (512, 1.0): 4})])
    assert "dashed" not in beyond.get_supxlabel()
    assert "beyond the window of 256 tokens" in beyond.get_supxlabel().replace("\n", " ")
    assert [text.get_text() for text in beyond.axes[0].get_yticklabels()] == ["0", "0.999", "1"]
    assert "dashed" in draw_retrieval([retrieval({(256, 0.0): 4, (512, 0.0): 4})]).get_supxlabel()


def test_titles_of_panels_stay_apart(retrieval):
    long = [
        retrieval({(256, 0.0): 4}, checkpoint=f"organisation/some-checkpoint-name-{n}", method="yarn") for n in "abc"
    ]
    figure = draw_retrieval([replace(one, params={"beta_fast": 64.0, "beta_slow": 2.0}) for one in long])
    assert no_texts_touch(figure, [axes.title for axes in figure.axes if axes.images])


def test_long_names_leave_the_data_their_room(report):
    long = [
        replace(
            report(18.0, 25.0, 47.0, checkpoint=f"{step}/a/long/path/{'x' * 60}/checkpoint", method="yarn"),
            params={"beta_fast": 64.0, "beta_slow": 2.0 + step},
            digest=str(step),
        )
        for step in range(3)
    ]
    for draw in (draw_perplexity, draw_comparison):
        figure = draw(long, PPL)
        figure.draw_without_rendering()
        inches = figure.get_size_inches()[0]
        assert sum(axes.get_position().width for axes in figure.axes) * inches > 5.5
        drawn = figure.get_tightbbox()
        assert 0 <= drawn.x0 < drawn.x1 <= inches


def test_whiskers_stand_apart_and_are_left_out_of_many_lines(report):
    same = [report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(7)]
    figure = draw_perplexity(same[:3], PPL)
    figure.draw_without_rendering()
    places = {round(bars.get_transform().transform((256.0, 18.0))[0]) for bars in figure.axes[0].collections[::2]}
    assert len(places) == 3
    figure = draw_perplexity(same, PPL)
    assert not figure.axes[0].collections
    assert "left out" in figure.get_supxlabel()


def test_more_lines_than_looks_are_refused(report):
    many = [report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(45)]
    for draw in (lambda: draw_perplexity(many, PPL), lambda: draw_context(many)):
        with pytest.raises(DataError, match="--kind comparison"):
            draw()


def test_two_points_of_loss_by_context_are_refused(reports):
    tail = [replace(one, rows=[replace(row, by_context=row.by_context[1:]) for row in one.rows]) for one in reports]
    with pytest.raises(DataError, match="3 points"):
        draw_context([replace(one, protocol="tail") for one in tail])


def test_lengths_are_beyond_a_window_that_all_share(reports):
    other = replace(reports[1], original_max_position_embeddings=512)
    figure = draw_comparison([reports[0], other], PPL)
    assert [axes.get_title() for axes in figure.axes] == ["256 tokens", "512 tokens", "1024 tokens"]
    assert "windows differ (256 to 512 tokens)" in figure.get_supxlabel()


def test_the_best_is_so_among_the_same_tokens(reports):
    figure = draw_comparison([reports[0], replace(reports[1], fingerprint="2" * 64)], PPL)
    note = figure.get_supxlabel().replace("\n", " ")
    assert "filled: the best among those of the same tokens" in note
    assert "ropecli plot --metric bits-per-byte" in note


def test_numbers_of_huge_values_do_not_touch(report):
    both = [report(1e300, 15.0, 1e30), report(15.0, 15.0, 15.0, method="yarn", factor=4.0)]
    figure = draw_comparison(both, PPL)
    for axes in figure.axes[::2]:
        assert no_texts_touch(figure, axes.get_xticklabels())
        assert min(axes.get_xticks()) >= 1


def test_the_kind_that_suits_is_drawn(report, retrieval, tmp_path):
    many = [report(18.0, 25.0, 47.0, method="linear", factor=2.0 + index) for index in range(9)]
    for name, reports, words in (
        ("lines", many[:2], "context length (tokens), logarithmic"),
        ("rows", many, "512 tokens"),
        ("map", [retrieval({(256, 0.0): 4})], "depth of the key (0 to 1)"),
    ):
        draw_report_plot(reports, tmp_path / f"{name}.svg")
        assert words in texts(tmp_path / f"{name}.svg")
