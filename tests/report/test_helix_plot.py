"""Helices: eleven dots where theory puts them, and how far apart they are, whatever the rope."""

from itertools import combinations

import numpy as np
import pytest
from rich.console import Console

from ropecli.errors import DataError
from ropecli.report.plots import style
from ropecli.report.study.helix import chart, figure, slower_pair, spacing
from ropecli.rope import RopeGeometry


def printed(renderable, width=100):
    console = Console(width=width, record=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def by_hand(rope, pair):
    return np.array(
        [
            (np.cos(t * rope.inv_freq[0]), np.sin(t * rope.inv_freq[0]), np.sin(t * rope.inv_freq[pair]))
            for t in range(-5, 6)
        ]
    )


def no_texts_touch(drawn):
    with style.drawing():
        drawn.draw_without_rendering()
    found = [drawn._suptitle, drawn._supxlabel]
    for axes in drawn.axes:
        found += [axes.title, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            found += [axis.label, *(tick.label1 for tick in axis.get_major_ticks())]
    boxes = [text.get_window_extent() for text in found if text is not None and text.get_text()]
    frame = drawn.bbox
    inside = all(
        frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes
    )
    return len(boxes) > 10 and inside and not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize("geometry", [{}, {"head_dim": 32}, {"head_dim": 4}, {"head_dim": 2}])
def test_dots_are_theorys_and_the_numbers_theirs(study, geometry):
    made = study("linear", "nope", **geometry)
    drawn = figure(made)
    pair = slower_pair(made.geometry)
    assert [axes.get_title() for axes in drawn.axes] == ["pretrained", "linear ×8", "nope ×8"]
    for axes, rope in zip(drawn.axes, made.ropes.values(), strict=True):
        (dots,) = [line for line in axes.lines if line.get_marker() == "o"]
        expected = by_hand(rope, pair)
        np.testing.assert_allclose(np.transpose(dots.get_data_3d()), expected, atol=1e-12)
        apart = np.linalg.norm(expected[:, None] - expected[None], axis=-1)
        closest = min(apart[one, other] for one, other in combinations(range(11), 2))
        neighbours = np.mean([apart[one, one + 1] for one in range(10)])
        found = spacing(rope, pair)
        assert found.closest == pytest.approx(closest, abs=1e-12)
        assert found.neighbours == pytest.approx(neighbours, abs=1e-12)
        assert f"from dot to dot {neighbours:.2f}\nclosest two {closest:.2f}" in axes.texts[0].get_text()
        lines = [np.transpose(line.get_data_3d()) for line in axes.lines if line.get_marker() != "o"]
        for line in lines:  # the dots lie on both
            assert np.linalg.norm(expected[:, None] - line[None], axis=-1).min(axis=1).max() < 0.1


def test_the_slower_pair_is_the_one_that_abf_halves(study):
    assert slower_pair(RopeGeometry(128, 128, 1e4, 4096)) == 11
    made = study("abf")
    ratio = made.ropes["abf ×8"].inv_freq[11] / made.geometry.inv_freq()[11]
    assert ratio == pytest.approx(0.5, rel=0.03)
    assert f"(×{ratio:.2f})" in figure(made).get_supxlabel().replace("\n", " ")
    assert slower_pair(RopeGeometry(4, 4, 1e4, 4096)) == 1
    assert slower_pair(RopeGeometry(2, 2, 1e4, 4096)) == 0


def test_pi_crowds_the_dots_and_abf_keeps_neighbours_apart(study):
    """The paper's reading of its figure 8, with its caveat on ABF: the closest two are no neighbours."""
    made = study("linear", "abf")
    plain, linear, abf = (spacing(rope, 11) for rope in made.ropes.values())
    assert linear.neighbours == pytest.approx(plain.neighbours / 8, rel=0.05)
    assert abf.neighbours == pytest.approx(plain.neighbours, rel=0.02)
    assert abf.closest < 0.75 * plain.closest
    assert (linear.gap, abf.gap) == (1, 6)


@pytest.mark.parametrize(
    "methods",
    [(), ("linear",), ("linear", "abf"), ("linear", "abf", "ntk", "yarn", "llama3", "p-rope", "nope", "rerope")],
)
@pytest.mark.parametrize("head_dim", [128, 32])
def test_no_texts_overlap(study, methods, head_dim):
    assert no_texts_touch(figure(study(*methods, head_dim=head_dim)))


def test_remapping_methods_have_no_helix_of_their_own(study):
    drawn = figure(study("rerope", "linear", "self-extend"))
    assert [axes.get_title() for axes in drawn.axes] == ["pretrained", "linear ×8"]
    assert "rerope ×8, self-extend ×8 change distances" in drawn.get_supxlabel().replace("\n", " ")


def test_more_than_eight_are_refused(study):
    methods = ("linear", "abf", "ntk", "yarn", "llama3", "p-rope", "nope")
    assert len(figure(study(*methods)).axes) == 8
    for draw in (figure, chart):
        with pytest.raises(DataError, match=r"9 helices.*holds 8.*up to 7 methods with --method"):
            draw(study(*methods, "ntk-by-parts"))


def test_the_terminal_has_a_letter_where_each_dot_lies(study):
    made = study("linear")
    text = printed(chart(made), 60)
    rows = [line[2:38] for line in text.splitlines() if line.startswith("│")][:15]
    for letter, (_, across, up) in zip("abcdefghijk", by_hand(made.ropes["pretrained"], 11), strict=True):
        assert rows[round((1 - up) * 7)][round((1 + across) * 17.5)] == letter
    assert "linear ×8" in text
    assert "from dot to dot 0.13" in text
    assert "+" in printed(chart(study("nope")), 60)
