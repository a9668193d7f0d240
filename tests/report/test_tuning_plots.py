"""What a tuning run tried, as it is drawn: the report's own numbers, what is left out is said, nothing overlaps."""

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from itertools import combinations

import numpy as np
import pytest
from rich.console import Console

from ropecli.errors import DataError
from ropecli.report.kinds import KINDS, choose_kind
from ropecli.report.plots import draw_report_plot, style
from ropecli.report.tuned import frequencies, gains, search
from ropecli.report.tuned.course import Course
from ropecli.rope import RopeGeometry, ScalingSpec
from ropecli.scaling.registry import scale
from ropecli.tune.record import LayerGains, Score

OVERFLOWED = Score(math.inf, math.inf, math.inf, 0)


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def labels(axes):
    return [text.get_text().replace("\n", " ") for text in axes.get_legend().get_texts()]


def texts(drawn):
    """Every text that is seen, and where."""
    with style.drawing():
        drawn.draw_without_rendering()
    found = [drawn._suptitle, drawn._supxlabel]
    for axes in drawn.axes:
        found += [axes.xaxis.label, axes.yaxis.label, axes.title, *axes.texts]
        found += axes.get_legend().get_texts() if axes.get_legend() else []
        # ticks beyond the limits have labels that are not drawn
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high:
                    found += [label for label in (tick.label1, tick.label2) if label.get_visible()]
    return [(text.get_text(), text.get_window_extent()) for text in found if text is not None and text.get_text()]


def refuse_overlaps(drawn):
    found = texts(drawn)
    assert all(drawn.bbox.x0 <= box.x0 and box.x1 <= drawn.bbox.x1 for _, box in found)
    assert all(drawn.bbox.y0 <= box.y0 and box.y1 <= drawn.bbox.y1 for _, box in found)
    assert [(a, b) for (a, one), (b, other) in combinations(found, 2) if one.overlaps(other)] == []


def printed(renderable, width=100, encoding="utf-8"):
    file = TextIOWrapper(BytesIO(), encoding=encoding, errors="replace")
    Console(file=file, width=width).print(renderable)
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def test_every_point_stands_at_its_cost_and_its_perplexities(tuning):
    report = tuning("heads")
    drawn = search.figure([report])
    spent = np.cumsum([point.seconds for point in report.points])
    for axes, at in zip(drawn.axes, ("target", "window"), strict=True):
        found = lines(axes)
        for documents in (2, 4, 8, 16):
            own = [
                index
                for index, point in enumerate(report.points)
                if point.level == "grid" and point.score.documents == documents
            ]
            line = found[f"grid, {documents} documents"]
            assert line.get_linestyle() == "None"
            assert (line.get_markerfacecolor() == "white") == (documents < 16)
            np.testing.assert_allclose(line.get_xdata(), spent[own])
            expected = [math.exp(getattr(report.points[index].score, at)) for index in own]
            np.testing.assert_allclose(line.get_ydata(), expected)
        curve = found["heads, 16 documents, step 10 to 100"]
        assert curve.get_linestyle() != "None"
        np.testing.assert_allclose(curve.get_xdata(), spent[-10:])
        np.testing.assert_allclose(
            curve.get_ydata(), [math.exp(getattr(point.score, at)) for point in report.points[-10:]]
        )
        assert axes.get_yscale() == "log"
    assert "on fewer documents (hollow): of other text" in drawn.get_supxlabel()
    markers = [line.get_marker() for line in lines(drawn.axes[0]).values() if line.get_marker() not in ("None", "")]
    assert len(set(markers)) == len(markers) == 5


def test_the_best_so_far_is_so_by_the_objective_among_the_whole_readings(tuning):
    report = tuning("heads")
    drawn = search.figure([report])
    line = lines(drawn.axes[0])["best so far, of those on 16 documents"]
    spent, best, whole = 0.0, math.inf, 0
    for point in report.points:
        spent += point.seconds
        if point.score.documents < 16:
            continue
        whole += 1
        if point.score.objective < best:
            best, expected = point.score.objective, math.exp(point.score.target)
        # what the line shows just after the measurement
        last = np.flatnonzero(line.get_xdata() <= spent + 1e-9)[-1]
        assert line.get_ydata()[last] == pytest.approx(expected)
        if whole == 1:
            assert line.get_xdata()[0] == pytest.approx(spent)
    assert "the best: by the loss at 1024 tokens + 0.25 × that at the window" in drawn.get_supxlabel()


def test_the_states_that_it_is_held_against_are_levels(tuning):
    target, window = search.figure([tuning("heads")]).axes
    drawn = {name: line.get_ydata()[0] for name, line in lines(target).items() if ":" in name}
    assert drawn == pytest.approx(
        {
            "as pretrained, at 256 tokens: 13.55": 13.55,
            "yarn ×4, nothing tuned: 14.91": 14.91,
            "best constants: 14.31": 14.31,
            "result, after 100 steps: 13.24": math.exp(tuning("heads").score.target),
        }
    )
    assert "as pretrained, at 1024 tokens: 47.03, above" in labels(target)
    assert {"yarn ×4, nothing tuned: 15.47", "as pretrained, at 256 tokens: 13.55"} <= set(labels(window))
    dashes = [lines(target)[name]._unscaled_dash_pattern for name in drawn]
    assert len({str(dash) for dash in dashes}) == len(drawn)
    assert not [name for name in labels(search.figure([tuning("grid")]).axes[0]) if "best constants" in name]


def test_at_factor_one_the_pretrained_model_is_there_once(tuning):
    run = tuning("grid")
    same = replace(run, factor=1.0, target_length=256, base=replace(run.base, target=run.base.window))
    names = labels(search.figure([same]).axes[0])
    assert [name for name in names if "pretrained" in name] == ["as pretrained, at 256 tokens: 13.55"]
    frequencies.figure([same])


def test_the_result_is_ringed_where_it_was_measured(tuning):
    report = tuning("heads")
    kept = replace(report, score=report.points[-3].score, step=80)
    (ring,) = [line for line in search.figure([kept]).axes[0].lines if line.get_label() == "_result"]
    assert ring.get_xdata()[0] == pytest.approx(sum(point.seconds for point in report.points[:-2]))
    assert ring.get_ydata()[0] == pytest.approx(math.exp(report.points[-3].score.target))


def test_what_overflowed_and_what_lies_far_above_is_left_out_and_said(tuning):
    report = tuning("grid")
    far = replace(report.points[1], score=Score(7.0, 7.0, 8.75, 2))
    bad = [replace(point, score=OVERFLOWED) for point in report.points[2:5]]
    drawn = search.figure([replace(report, points=[report.points[0], far, *bad, *report.points[5:]])])
    axes = drawn.axes[0]
    line = lines(axes)["grid, 2 documents"]
    assert len(line.get_xdata()) == 24 - 3
    assert np.flatnonzero(np.isnan(line.get_ydata())).tolist() == [1]
    assert "3 measurements left out: the model overflowed there" in drawn.get_supxlabel().replace("\n", " ")
    assert "1 measurement has a perplexity above 28.62 at the target: marked" in drawn.get_supxlabel()
    assert axes.get_ylim()[1] < 30
    (edge,) = [line for line in axes.lines if line.get_label() == "_above"]
    assert edge.get_xdata().tolist() == pytest.approx([report.points[0].seconds + far.seconds])
    text = printed(search.chart([replace(report, points=[far, *bad, *report.points[5:]])]))
    assert "3 measurements left out" in text
    assert "at the target: not drawn" in text
    assert "above all that is drawn: as pretrained, at 1024 tokens: 47.03" in text


def test_nothing_but_overflows_still_has_its_states(tuning):
    report = tuning("grid")
    points = [replace(point, score=OVERFLOWED) for point in report.points]
    base = Score(math.inf, math.log(13.55), math.inf, 16)
    failed = replace(report, points=points, plain=OVERFLOWED, base=base)
    drawn = search.figure([failed])
    assert f"{len(points)} measurements left out" in drawn.get_supxlabel()
    assert {"yarn ×4, nothing tuned: overflowed, above", "result: 14.31"} <= set(labels(drawn.axes[0]))
    assert "result: 14.31" in printed(search.chart([failed]))


def test_a_run_that_is_worse_than_anything_is_seen_whole(tuning):
    report = tuning("grid")
    score = Score(6.0, 6.0, 7.5, 16)
    bad = replace(report, points=[replace(point, score=score) for point in report.points], score=score, begun=score)
    (axes, _) = search.figure([bad]).axes
    assert axes.get_ylim()[0] < 13.55 < math.exp(6) < axes.get_ylim()[1]
    assert np.isfinite(lines(axes)["grid, 16 documents"].get_ydata()).all()


def test_a_search_on_fewer_documents_than_its_result_is_set_apart(tuning):
    run = tuning("search", points=40)
    drawn = search.figure([run])
    found = lines(drawn.axes[0])
    assert found["search, 4 documents, iteration 0 to 39"].get_markerfacecolor() == "white"
    assert "best so far, of those on 4 documents" in found
    assert (
        "search reads 4 documents until its end, the result is of 16: its measurements are of other text"
        in drawn.get_supxlabel()
    )
    whole = replace(run, points=[replace(one, score=replace(one.score, documents=16)) for one in run.points])
    drawn = search.figure([whole])
    assert "hollow" not in drawn.get_supxlabel()
    assert lines(drawn.axes[0])["search, 16 documents, iteration 0 to 39"].get_markerfacecolor() != "white"
    for one, expected in ((run, 0), (whole, len(Course(whole).best_so_far()) * 2)):
        (_, best) = [line for line in search.figure([tuning("grid"), one]).axes[0].lines if line.get_label() == "_best"]
        assert len(best.get_xdata()) == expected


@pytest.mark.parametrize("points", [1, 2, 2000])
@pytest.mark.parametrize("level", ["grid", "search"])
def test_one_point_and_thousands(tuning, level, points):
    report = tuning(level, points=points)
    drawn = search.figure([report])
    shown = sum(
        len(line.get_xdata())
        for name, line in lines(drawn.axes[0]).items()
        if "document" in name and "best" not in name
    )
    assert shown == len(report.points)
    refuse_overlaps(drawn)
    assert "result" in printed(search.chart([report]), 60)


def test_points_all_unlike_are_grouped_by_level_alone(tuning):
    report = tuning("grid")
    points = [
        replace(point, score=replace(point.score, documents=index + 20)) for index, point in enumerate(report.points)
    ]
    found = lines(search.figure([replace(report, points=points)]).axes[0])
    assert len(found["grid"].get_xdata()) == len(points)
    assert f"best so far, of those on {len(points) + 19} documents" in found


def test_several_runs_are_lines_to_compare(tuning):
    reports = [tuning("grid"), tuning("heads"), tuning("lora"), tuning("search", points=400)]
    drawn = search.figure(reports)
    names = ["grid, yarn ×4", "heads, yarn ×4, 513 numbers learned", "lora, yarn ×4, 12,288 numbers learned"]
    names.append("search, longrope ×4")
    for axes, at in zip(drawn.axes, ("target", "window"), strict=True):
        results = [f"{name}: {math.exp(getattr(one.score, at)):.2f}" for name, one in zip(names, reports, strict=True)]
        assert labels(axes)[:4] == results
        for name, report in zip(names, reports, strict=True):
            marker = lines(axes)[name]
            assert marker.get_xdata()[0] == pytest.approx(sum(point.seconds for point in report.points))
            assert marker.get_ydata()[0] == pytest.approx(math.exp(getattr(report.score, at)))
        assert "as pretrained, at 256 tokens: 13.55" in labels(axes)
        assert not [name for name in labels(axes) if "best constants" in name or "result" in name]
        assert axes.get_xscale() == "log"
    assert "search reads 4 documents until its end, the result is of 16: here the result alone" in drawn.get_supxlabel()
    refuse_overlaps(drawn)
    text = printed(search.chart(reports))
    for letter, name, report in zip("abcd", names, reports, strict=True):
        assert f"{letter}  {name}: {math.exp(report.score.target):.2f} at" in text


def test_runs_that_cannot_be_compared_are_warned_of(tuning):
    one = tuning("grid")
    for other in (replace(one, fingerprint="4" * 64), replace(one, digest="1" * 64), replace(one, target_length=512)):
        drawn = search.figure([one, other])
        assert "not of the same tokens" in drawn.get_supxlabel()
        assert not [name for name in labels(drawn.axes[0]) if "pretrained" in name]
    assert "not of the same tokens" not in search.figure([one, tuning("heads")]).get_supxlabel()
    with pytest.raises(DataError, match="45 tuning runs are too many"):
        search.figure([one] * 45)


def test_a_run_far_worse_than_the_others_is_said_in_the_terminal(tuning):
    one = tuning("grid")
    score = Score(9.0, 9.0, 11.25, 16)
    bad = replace(one, points=[replace(point, score=score) for point in one.points], score=score)
    text = printed(search.chart([one, replace(bad, method="abf")]))
    assert "above all that is drawn: grid, abf ×4: 8103.08" in text


def test_text_that_is_easy_does_not_push_the_levels_out(tuning):
    run = tuning("grid")
    easy = replace(run.points[0], score=Score(math.log(5), math.log(5), 1.25 * math.log(5), 2))
    (axes, _) = search.figure([replace(run, points=[easy, *run.points[1:]])]).axes
    assert axes.get_ylim()[0] < 5 < 14.91 < axes.get_ylim()[1]
    assert "yarn ×4, nothing tuned: 14.91" in labels(axes)


def test_runs_of_one_result_share_no_level_of_it(tuning):
    names = labels(search.figure([tuning("heads"), tuning("heads")]).axes[0])
    assert not [name for name in names if name.startswith(("result", "best constants"))]
    assert names[0].startswith("heads, yarn ×4, 513 numbers learned: ")
    assert names[1].startswith("heads, yarn ×4, 513 numbers learned (2): ")


def test_long_runs_count_in_minutes_and_hours(tuning):
    report = tuning("grid", points=2)
    for seconds, unit in ((100, "seconds"), (700, "minutes"), (9000, "hours")):
        slow = replace(report, points=[replace(point, seconds=seconds / 2) for point in report.points])
        axes = search.figure([slow]).axes
        assert axes[1].get_xlabel().startswith(unit)
        assert axes[0].get_xlim()[1] * {"seconds": 1, "minutes": 60, "hours": 3600}[unit] == pytest.approx(
            1.04 * seconds
        )


def test_no_time_at_all_is_drawn(tuning):
    report = tuning("grid")
    instant = replace(report, points=[replace(point, seconds=0.0) for point in report.points])
    search.figure([instant])
    drawn = search.figure([instant, report])
    refuse_overlaps(drawn)
    # at the beginning of a logarithmic axis, which has no 0
    (low, high), shown = drawn.axes[0].get_xlim(), lines(drawn.axes[0])["grid, yarn ×4"].get_xdata()
    assert low < shown[0] < high
    assert all((line.get_xdata() > 0).all() for line in drawn.axes[0].lines if line.get_label() == "_best")


def test_gains_are_the_maps(tuning):
    report = tuning("heads", layers=3, heads=5, pairs=7)
    drawn = gains.figure([report])
    maps = [axes.images[0] for axes in drawn.axes if axes.images]
    assert len(maps) == 6
    # gain and phase of a layer side by side
    for layer, gain, phase in zip(report.gains, maps[::2], maps[1::2], strict=True):
        np.testing.assert_allclose(gain.get_array(), layer.log_gain)
        np.testing.assert_allclose(phase.get_array(), layer.phase)
    for own, images in (("log_gain", maps[::2]), ("phase", maps[1::2])):
        end = max(np.abs(getattr(layer, own)).max() for layer in report.gains)
        assert {image.get_clim() for image in images} == {(-end, end)}
    assert drawn.axes[0].get_ylabel() == "layer 0\nquery head"
    assert "common 0.9704" in drawn.get_supxlabel()


def test_the_sign_is_hatched_and_the_lightness_tells_how_much(tuning):
    report = tuning("heads", layers=1, heads=3, pairs=4)
    axes = gains.figure([report]).axes[0]
    (patch,) = axes.patches
    assert patch.get_hatch()
    centres = patch.get_path().vertices.reshape(-1, 5, 2)[:, :4].mean(axis=1)
    negative = {(float(pair), float(head)) for head, pair in np.argwhere(np.array(report.gains[0].log_gain) < 0)}
    assert {tuple(one) for one in centres.tolist()} == negative
    image = axes.images[0]
    with style.drawing():
        colours = image.cmap(np.linspace(0, 1, 101))[:, :3] @ (0.2126, 0.7152, 0.0722)
    assert (np.diff(colours[:51]) > 0).all()
    assert (np.diff(colours[50:]) < 0).all()
    assert abs(colours[0] - colours[-1]) < 0.1


def test_many_layers_are_a_summary_and_maps_of_those_that_changed_most(tuning):
    report = tuning("heads", layers=12, heads=2, pairs=4)
    for changed in (3, 5, 7, 11):
        layer = report.gains[changed]
        report.gains[changed] = replace(layer, log_gain=(2 * np.array(layer.log_gain) + 2).tolist())
    drawn = gains.figure([report])
    means = lines(drawn.axes[0])["mean |log gain|"], lines(drawn.axes[1])["mean |phase| (radians)"]
    for line, own in zip(means, ("log_gain", "phase"), strict=True):
        np.testing.assert_allclose(line.get_ydata(), [np.abs(getattr(layer, own)).mean() for layer in report.gains])
    shown = [axes.get_ylabel() for axes in drawn.axes if axes.images and axes.get_ylabel()]
    assert shown == [f"layer {index}\nquery head" for index in (3, 5, 7, 11)]
    assert "maps of the 4 layers of 12 that changed most" in drawn.get_supxlabel()
    refuse_overlaps(drawn)


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": 1, "heads": 1, "pairs": 2},
        {"layers": 8, "heads": 4, "pairs": 16},
        {"layers": 32, "heads": 32, "pairs": 64},
        {"layers": 3, "phases": False},
        {"layers": 40, "phases": False, "pairs": 64},
    ],
)
def test_maps_of_every_size(tuning, shape):
    report = tuning("heads", **shape)
    drawn = gains.figure([report])
    refuse_overlaps(drawn)
    assert ("phase" in " ".join(text for text, _ in texts(drawn)[2:])) == shape.get("phases", True)
    text = printed(gains.chart([report]), 60)
    assert max(map(len, text.splitlines())) <= 60
    assert text.count("\n") < 80 + 2 * shape["layers"]


def test_layers_of_other_shapes_and_without_phases_stand_together(tuning):
    report = tuning("heads", layers=2, heads=4, pairs=8)
    odd = [
        report.gains[0],
        LayerGains("model.layers.0.self_attn.q_norm", [[0.1, -0.2]], []),
        LayerGains("language", [[0.0] * 3] * 2, [[0.5] * 3] * 2),
    ]
    drawn = gains.figure([replace(report, gains=odd)])
    refuse_overlaps(drawn)
    assert "no phase: all heads share a norm" in [text for text, _ in texts(drawn)]
    assert [axes.get_ylabel().split("\n")[1] for axes in drawn.axes[:6:2]] == ["query head", "all heads", "query head"]
    # two are of layer 0, so that their own numbers are none
    assert [axes.get_ylabel().split("\n")[0] for axes in drawn.axes[:6:2]] == ["layer 0", "layer 1", "layer 2"]
    assert "–" in printed(gains.chart([replace(report, gains=odd)]))


def test_the_terminal_has_the_gains_by_layer(tuning):
    report = tuning("heads", layers=2, heads=3, pairs=4)
    text = printed(gains.chart([report]))
    for index, layer in enumerate(report.gains):
        log_gain, phase = np.array(layer.log_gain), np.array(layer.phase)
        row = next(line for line in text.splitlines() if line.startswith(f"│     {index} "))
        for number in (f"{np.abs(log_gain).mean():.3f}", f"{np.exp(log_gain).min():.3g} to", f"{phase.max():+.3f}"):
            assert number in row
    by_pair = np.abs([layer.log_gain for layer in report.gains]).mean(axis=(0, 1))
    assert f"mean |log gain|: {by_pair[-1]:.3g} at pair 3" in text


def test_nothing_learned_is_drawn_as_nothing(tuning):
    report = tuning("heads", layers=1, heads=2, pairs=4)
    none = [LayerGains("model.layers.7.q", [[0.0] * 4] * 2, [[0.0] * 4] * 2)]
    axes = gains.figure([replace(report, gains=none)]).axes[0]
    assert axes.images[0].get_clim() == (-0.01, 0.01)
    assert axes.get_ylabel() == "layer 7\nquery head"
    assert not axes.patches
    printed(gains.chart([replace(report, gains=none)]))


@pytest.mark.parametrize("level", ["grid", "lora", "search"])
def test_a_run_without_gains_is_refused(tuning, level):
    for draw in (gains.figure, gains.chart):
        with pytest.raises(DataError, match=rf"demo has no gains: level {level} learns none.*--level heads"):
            draw([tuning(level)])
    with pytest.raises(DataError, match="one tuning run, and 2 were given"):
        gains.figure([tuning("heads"), tuning("heads")])


def test_frequencies_are_ratios_beside_the_methods_own(tuning):
    report = tuning("heads")
    (axes,) = frequencies.figure([report]).axes
    drawn = lines(axes)
    chosen = drawn["heads, yarn ×4, 513 numbers learned"]
    np.testing.assert_allclose(chosen.get_ydata(), np.array(report.inv_freq) / report.pretrained_inv_freq)
    geometry = RopeGeometry(32, 32, 10000.0, 256)
    own = scale(geometry, ScalingSpec("yarn", 4.0)).inv_freq / geometry.inv_freq()
    np.testing.assert_allclose(drawn["yarn ×4, nothing tuned"].get_ydata(), own, rtol=1e-9)
    assert {"as pretrained: 1", "1/s at factor 4: 0.25"} <= set(drawn)
    turning = int((256 / (2 * math.pi / np.array(report.pretrained_inv_freq)) >= 1).sum())
    border = drawn[f"pairs 0 to {turning - 1} complete a turn inside the pretraining window"]
    assert list(border.get_xdata()) == [turning - 0.5] * 2
    assert axes.get_yscale() == "log"


def test_a_method_without_constants_of_its_own_stands_beside_yarn(tuning):
    report = tuning("search", points=40)
    factors = np.linspace(1, 5, 16)
    chosen = replace(report, inv_freq=(np.array(report.pretrained_inv_freq) / factors).tolist())
    assert "yarn ×4, nothing tuned" in lines(frequencies.figure([chosen]).axes[0])
    drawn = lines(frequencies.figure([chosen, tuning("heads")]).axes[0])
    np.testing.assert_allclose(drawn["search, longrope ×4"].get_ydata(), 1 / factors)
    assert [name for name in drawn if "nothing tuned" in name] == ["yarn ×4, nothing tuned"]
    text = printed(frequencies.chart([chosen]))
    assert "a  search, longrope ×4: 0.2 at pair 15" in text


def test_pairs_that_stand_still_are_said(tuning):
    report = tuning("grid")
    frequency = [*report.inv_freq[:12], 0.0, 0.0, 0.0, 0.0]
    still = [*report.pretrained_inv_freq[:14], 0.0, 0.0]
    drawn = frequencies.figure([replace(report, inv_freq=frequency, pretrained_inv_freq=still)])
    note = drawn.get_supxlabel().replace("\n", " ")
    assert "2 of 16 pairs of yarn ×4 do not turn, shown at 0" in note
    assert "2 pairs did not turn in pretraining" in note
    refuse_overlaps(drawn)


@pytest.mark.parametrize(
    "pretrained", [[1.0], [0.0, 0.0], [1.0, 0.5, 0.1], [0.5, 0.25], [1.0, 1e-50], [1.0, 1.0], [1.0, 5.0]]
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_frequencies_of_no_base_have_no_method_beside(tuning, pretrained):
    report = replace(tuning("grid"), inv_freq=[0.5] * len(pretrained), pretrained_inv_freq=pretrained)
    if not any(pretrained):
        with pytest.raises(DataError, match="No pair of demo turned in pretraining"):
            frequencies.figure([report])
        return
    drawn = frequencies.figure([report])
    assert not [name for name in lines(drawn.axes[0]) if "nothing tuned" in name]
    assert "no plain pretrained frequencies" in drawn.get_supxlabel()
    printed(frequencies.chart([report]))


HOSTILE = "<b>$x^2$</b>\x1b[31m\n" + "n" * 5000


@pytest.mark.parametrize("kind", ["tuning", "gains", "tuned-frequencies"])
def test_hostile_names_are_harmless(tuning, tmp_path, kind):
    report = tuning("heads")
    report = replace(
        report,
        checkpoint=HOSTILE,
        level=HOSTILE,
        method=HOSTILE,
        source=HOSTILE,
        settings={"methods": [HOSTILE], "short_weight": HOSTILE},
        plain_name=HOSTILE,
        points=[replace(point, level=HOSTILE, method=HOSTILE) for point in report.points],
        gains=[replace(layer, name=HOSTILE) for layer in report.gains],
    )
    reports = [report] if kind == "gains" else [report, replace(report, digest="5" * 64)]
    for some in (reports, reports[:1]):
        drawn = KINDS[kind].figure(some, None)
        refuse_overlaps(drawn)
        style.save(drawn, tmp_path / "plot.svg")
        ET.parse(tmp_path / "plot.svg")
        text = printed(KINDS[kind].terminal(some, None), 80)
        assert "\x1b" not in text
        assert len(text) < 20_000


@pytest.mark.parametrize("kind", ["tuning", "gains", "tuned-frequencies"])
def test_every_kind_is_a_picture_and_a_chart(tuning, tmp_path, kind):
    report = tuning("heads")
    for name in ("plot.png", "plot.svg"):
        draw_report_plot([report], tmp_path / name, kind)
        assert (tmp_path / name).stat().st_size > 5000
    refuse_overlaps(KINDS[kind].figure([report], None))
    for width in (60, 120):
        for encoding in ("utf-8", "ascii"):
            text = printed(KINDS[kind].terminal([report], None), width, encoding)
            assert max(map(len, text.splitlines())) <= width


def test_the_kind_that_suits(tuning, report, written):
    assert choose_kind([tuning("grid"), tuning("heads")]) is KINDS["tuning"]
    with pytest.raises(DataError, match="does not draw a tune report"):
        choose_kind([tuning("grid")], "perplexity")
    with pytest.raises(DataError, match="--kind gains does not draw a perplexity report"):
        choose_kind([report(18.0, 25.0, 47.0)], "gains")
    with pytest.raises(DataError, match=r"different kinds \(perplexity, tune\)"):
        choose_kind([report(18.0, 25.0, 47.0), tuning("grid")])


def test_the_command_draws_it_and_loads_no_model_library(tuning, written, tmp_path):
    import subprocess
    import sys

    path = written(tuning("heads"), "tune.json")
    assert json.loads(path.read_text())["kind"] == "tune"
    code = """
import sys
from ropecli.cli.app import main
sys.argv = ["ropecli", "plot", sys.argv[1], "--kind", sys.argv[2], "--output", sys.argv[3], "--terminal"]
try:
    main()
except SystemExit as stop:
    assert not stop.code
assert not {"torch", "transformers"} & set(sys.modules)
"""
    for kind, words in (("tuning", "result: 13.24"), ("gains", "mean |phase|")):
        command = [sys.executable, "-c", code, path, kind, tmp_path / f"{kind}.svg"]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        assert words in result.stdout
        assert (tmp_path / f"{kind}.svg").is_file()
