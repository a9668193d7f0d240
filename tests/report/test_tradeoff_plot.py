"""The two objectives: a point a rope where theory puts it, each with its name, however close they lie."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from matplotlib.text import Text
from rich.console import Console

from ropecli.checkpoint.study import Study
from ropecli.errors import DataError
from ropecli.report.plots import style
from ropecli.report.plots.labels import name_points
from ropecli.report.study.tradeoff import chart, figure, points
from ropecli.rope import RopeGeometry, ScaledRope, ScalingSpec
from ropecli.theory.images import closest_images, distance_to_old_images

TEN = ("linear", "abf", "ntk", "yarn", "llama3", "p-rope", "nope", "ntk-by-parts", "dynamic", "rerope")


def printed(renderable, width=100):
    console = Console(width=width, record=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def seen(drawn):
    """Boxes of all texts, and of the points' markers."""
    with style.drawing():
        drawn.draw_without_rendering()
    (axes,) = drawn.axes
    found = [drawn._suptitle, drawn._supxlabel, axes.xaxis.label, axes.yaxis.label, axes._left_title, *axes.texts]
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    # not an annotation's own extent, which has its line
    texts = [Text.get_window_extent(text) for text in found if text is not None and text.get_text()]
    return texts, [line.get_window_extent().padded(4) for line in axes.lines]


def test_points_are_theorys(study):
    made = study(*TEN, window=512)
    drawn = {line.get_label(): line for line in figure(made).axes[0].lines}
    assert list(drawn) == [name for name in made.ropes if name != "rerope ×8"]
    for name, line in drawn.items():
        inv_freq = made.ropes[name].inv_freq
        old = distance_to_old_images(made.geometry.inv_freq(), inv_freq, 512, 4096)
        assert (line.get_xdata()[0], line.get_ydata()[0]) == (old, closest_images(inv_freq, 4096).distance)
    assert (drawn["nope ×8"].get_xdata()[0], drawn["nope ×8"].get_ydata()[0]) == (0, 0)


def test_no_two_points_look_alike(study):
    drawn = figure(study(*TEN, window=512)).axes[0].lines
    assert len({line.get_marker() for line in drawn}) == len(drawn) == 10


@pytest.mark.parametrize(
    "geometry", [{"window": 2048}, {"rope_theta": 5e5, "window": 512}, {"head_dim": 32, "window": 256}]
)
@pytest.mark.parametrize("methods", [(), ("yarn", "ntk-by-parts"), TEN], ids=["none", "same", "ten"])
def test_every_point_has_its_name_and_no_texts_overlap(study, geometry, methods):
    made = study(*methods, **geometry)
    drawn = figure(made)
    names = [name for text in drawn.axes[0].texts for name in text.get_text().replace("\n", " ").split(", ")]
    assert sorted(names) == sorted(name for name in made.ropes if name != "rerope ×8")
    together = [text for text in drawn.axes[0].texts if "yarn ×8, ntk-by-parts ×8" in text.get_text()]
    assert bool(together) == ("yarn" in methods)
    texts, markers = seen(drawn)
    assert not any(one.overlaps(other) for one, other in combinations(texts, 2))
    assert not any(text.overlaps(marker) for text in texts for marker in markers)
    frame = drawn.axes[0].get_window_extent()
    assert all(
        frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in markers
    )


def named(points):
    with style.drawing():
        drawn = style.new_figure(8, 6)
        axes = drawn.subplots()
        axes.plot(*zip(*points.values(), strict=True), linestyle="", marker="o")
        name_points(drawn, axes, points)
        drawn.draw_without_rendering()
    texts = [Text.get_window_extent(text) for text in axes.texts]
    dots = [axes.transData.transform(point) for point in points.values()]
    assert not any(one.overlaps(other) for one, other in combinations(texts, 2))
    assert not any(box.padded(3).contains(*dot) for box in texts for dot in dots)
    return [text.get_text().replace("\n", " ") for text in axes.texts]


def test_points_of_one_place_are_named_together_and_close_ones_apart():
    assert named({f"method {n}": (1.0, 2.0) for n in range(20)}) == [", ".join(f"method {n}" for n in range(20))]
    close = {f"method {n}": (1.0 + 0.01 * (n % 4), 2.0 + 0.01 * (n // 4)) for n in range(16)} | {"far": (2.0, 3.0)}
    assert named(close) == list(close)


def test_a_name_without_a_line_is_nearest_to_its_own_point():
    points = {f"method {n}": (1.0 + 0.04 * n, 2.0) for n in range(7)} | {"far": (3.0, 3.0), "none": (0.0, 0.0)}
    with style.drawing():
        drawn = style.new_figure(8, 6)
        axes = drawn.subplots()
        axes.plot(*zip(*points.values(), strict=True), linestyle="", marker="o")
        name_points(drawn, axes, points)
        drawn.draw_without_rendering()
    plain = [text for text in axes.texts if text.arrow_patch is None]
    assert 2 < len(plain) < 9
    for text in plain:
        box = Text.get_window_extent(text)
        places = {name: axes.transData.transform(point) for name, point in points.items()}
        away = {
            name: np.hypot(max(box.x0 - x, 0, x - box.x1), max(box.y0 - y, 0, y - box.y1))
            for name, (x, y) in places.items()
        }
        assert min(away, key=away.__getitem__) == text.get_text()


def test_too_many_points_are_refused():
    with pytest.raises(DataError, match="400 points are too many to be named"):
        named({f"method {n}": (n % 20, n // 20) for n in range(400)})


def test_names_stay_where_they_are_in_a_file(study, tmp_path):
    drawn = figure(study("yarn", "ntk-by-parts", head_dim=32, window=256))
    before = [box.bounds for box in seen(drawn)[0]]
    style.save(drawn, tmp_path / "plot.png")
    np.testing.assert_allclose([box.bounds for box in seen(drawn)[0]], before, atol=0.5)


def test_the_corner_that_is_better_and_what_has_no_point_are_said(study):
    drawn = figure(study("rerope", "linear", window=512))
    assert drawn.axes[0].get_title(loc="left") == "↖ better"
    assert "rerope ×8 changes distances" in drawn.get_supxlabel().replace("\n", " ")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("geometry", [{"head_dim": 2}, {"head_dim": 4}, {"head_dim": 64, "rotary_dim": 16}])
def test_small_heads_and_nothing_that_turns_can_be_drawn(study, tmp_path, geometry):
    made = study("nope", "p-rope", "linear", window=256, **geometry)
    style.save(figure(made), tmp_path / "plot.svg")
    geometry = replace(made.geometry, still_pairs=made.geometry.pairs)
    still = ScaledRope(geometry, ScalingSpec("none"), geometry.inv_freq())
    style.save(figure(Study("folder", 512, {"pretrained": still})), tmp_path / "still.svg")
    assert "linear ×8" in printed(chart(made))


def test_a_window_too_long_to_be_looked_through_is_refused():
    geometry = RopeGeometry(8, 8, 1e4, 2**20)
    rope = ScaledRope(geometry, ScalingSpec("none"), geometry.inv_freq())
    for draw in (figure, chart):
        with pytest.raises(DataError, match="1048576 tokens, too many"):
            draw(Study("folder", 2**20, {"pretrained": rope}))


def test_the_terminal_lists_the_values(study):
    made = study("linear", "nope", "rerope", window=512)
    text = printed(chart(made))
    for letter, (name, point) in zip("abc", points(made).items(), strict=True):
        assert f"{letter}  {name}: {point.closest:.4f} between the two closest at {point.old:.4f} from the old" in text
    assert "better: up and left" in text
    assert "rerope ×8 changes distances" in text
