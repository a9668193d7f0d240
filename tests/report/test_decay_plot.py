"""The decay plot draws the scores that theory gives, thinned without hiding any, and remapped ones where they are."""

from itertools import combinations

import numpy as np
import pytest
from rich.console import Console

from ropecli.report.plots import style
from ropecli.report.study.decay import chart, chosen_pairs, far_stop, figure, first_below, near_stop
from ropecli.report.study.envelope import envelope, reach_of, width_of
from ropecli.theory.decay import decay_estimate
from ropecli.theory.distances import seen_distances
from ropecli.theory.score import score

TEN = ("linear", "abf", "ntk", "yarn", "llama3", "p-rope", "nope", "ntk-by-parts", "rerope", "lm-infinite")


def labelled(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def exact(rope, stop, target):
    """The score at every distance, the long way; NaN where there is none."""
    seen = np.arange(stop, dtype=float)
    if rope.remapping is not None:
        seen = np.append(seen_distances(rope, target), np.full(max(0, stop - target), np.nan))[:stop]
    return np.array([sum(2 * np.cos(m * theta) for theta in rope.inv_freq) for m in seen])


def no_texts_touch(drawn):
    with style.drawing():
        drawn.draw_without_rendering()
    found = [drawn._suptitle, drawn._supxlabel]
    for axes in drawn.axes:
        found += [axes.xaxis.label, axes.yaxis.label, axes.title, *axes.texts]
        found += axes.get_legend().get_texts() if axes.get_legend() else []
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            found += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    boxes = [text.get_window_extent() for text in found if text is not None and text.get_text()]
    frame = drawn.bbox.padded(1)
    inside = all(
        frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1 for box in boxes
    )
    return len(boxes) > 10 and inside and not any(one.overlaps(other) for one, other in combinations(boxes, 2))


@pytest.mark.parametrize("method", ["yarn", "rerope", "self-extend", "lm-infinite"])
@pytest.mark.parametrize("stop", [37, 500, 1999])
def test_an_envelope_is_of_every_distance(study, method, stop):
    made = study(method, window=128, head_dim=16)
    rope = made.ropes[f"{method} ×8"]
    values = exact(rope, stop, made.target)
    found = envelope(rope, stop, made.target, 300)
    width = -(-stop // 300)
    assert found.width == width_of(stop, 300) == width
    parts = [values[start : start + width] for start in range(0, stop, width)]
    np.testing.assert_allclose(
        found.distances, [np.arange(stop)[k * width :][:width].mean() for k in range(len(parts))]
    )
    for part, low, mean, high in zip(parts, found.low, found.mean, found.high, strict=True):
        seen = part[~np.isnan(part)]
        expected = (seen.min(), seen.mean(), seen.max()) if seen.size else (np.nan,) * 3
        np.testing.assert_allclose((low, mean, high), expected, atol=1e-9)


def test_long_stretches_are_sampled_at_no_even_step(study):
    """710 tokens are 113 turns of this pair, to 1e-5: in even steps of them it would stand still."""
    made = study(head_dim=2)
    rope = made.ropes["pretrained"]
    found = envelope(rope, 50 * 1024 * 710, made.target, 50)
    assert found.low.max() < -1.99
    assert found.high.min() > 1.99
    assert np.abs(found.mean).max() < 0.2


def test_a_line_is_the_mean_of_whole_neighbourhoods_and_keeps_its_gaps(study):
    made = study("lm-infinite", window=2048)
    rope = made.ropes["lm-infinite ×8"]
    found = envelope(rope, made.target, made.target)
    smooth = found.smooth()
    assert reach_of(made.target) == 17 * found.width
    np.testing.assert_array_equal(np.isnan(smooth), np.isnan(found.mean))
    assert np.isnan(smooth).any()
    assert smooth[0] == found.mean[0]
    np.testing.assert_allclose(smooth[3], found.mean[:7].mean())
    np.testing.assert_allclose(smooth[20], found.mean[12:29].mean())
    last = int(np.flatnonzero(~np.isnan(found.mean[:400]))[-1])
    np.testing.assert_allclose(smooth[last], np.nanmean(found.mean[last - 8 : last + 9]))


def test_the_upper_axes_hold_the_scores_and_the_integral(study):
    made = study("yarn", "rerope")
    near, far, _ = figure(made).axes
    stops = near_stop(made), far_stop(made)
    assert stops == (5442, 54411)  # a tenth of λ_63 = 54,410, and all of it
    for axes, stop in zip((near, far), stops, strict=True):
        drawn = labelled(axes)
        for name, rope in made.ropes.items():
            below = first_below(rope, made.target, far_stop(made))
            line = drawn[f"{name}: first negative at {below}"]
            found = envelope(rope, stop, made.target)
            np.testing.assert_array_equal(line.get_xdata(), found.distances)
            np.testing.assert_array_equal(line.get_ydata(), found.smooth())
    integral = labelled(near)["pretrained, by integral"]
    expected = 128 * decay_estimate(made.geometry.inv_freq(), integral.get_xdata()).real
    np.testing.assert_array_equal(integral.get_ydata(), expected)
    assert far.texts[0].get_text() == "effective range: 5441 tokens"
    assert any(
        np.allclose(line.get_xdata(), [0, 0, 5441.02, 5441.02], atol=0.1)
        for line in far.lines
        if len(line.get_xdata()) == 4
    )


def test_windows_and_wavelengths_are_marked_where_they_are(study):
    near, far, below = figure(study("yarn")).axes
    marks = {label: line.get_xdata()[0] for label, line in labelled(far).items() if len(line.get_xdata()) == 2}
    assert marks.pop("longest wavelength (54410)") == pytest.approx(54410.14, abs=0.1)
    assert marks == {"pretraining window (4096)": 4096, "target (32768)": 32768}
    assert "pretraining window (4096)" in labelled(near)
    assert not any("target" in label or "longest" in label for label in labelled(near))
    assert "longest wavelength (54410)" in labelled(below)


@pytest.mark.parametrize("method", ["yarn", "linear", "rerope", "self-extend", "lm-infinite"])
def test_the_first_negative_score_is_that_of_the_true_distance(study, method):
    made = study(method, window=256, head_dim=16)
    rope = made.ropes[f"{method} ×8"]
    values = exact(rope, made.target, made.target)
    negative = np.flatnonzero(values < 0)
    assert first_below(rope, made.target, made.target) == (int(negative[0]) if negative.size else None)


def test_the_lower_axes_hold_three_pairs_and_the_methods_slowest(study):
    made = study("yarn", "nope", "rerope")
    drawn = labelled(figure(made).axes[2])
    inv_freq = made.geometry.inv_freq()
    pairs = chosen_pairs(inv_freq)
    assert pairs == [63, 51, 38]  # which turn once, 5.6 and 36.5 times in λ_63
    for pair in pairs:
        line = drawn.pop(f"pretrained, pair {pair}: λ = {2 * np.pi / inv_freq[pair]:.0f}")
        np.testing.assert_array_equal(line.get_ydata(), 2 * np.cos(line.get_xdata() * inv_freq[pair]))
    for name in ("yarn ×8", "nope ×8"):
        line = drawn.pop(f"{name}, pair 63")
        np.testing.assert_array_equal(line.get_ydata(), 2 * np.cos(line.get_xdata() * made.ropes[name].inv_freq[63]))
    assert list(drawn) == ["longest wavelength (54410)"]


def test_pairs_that_would_fill_the_axes_or_do_not_turn_are_not_chosen():
    assert chosen_pairs(np.array([1.0])) == [0]
    assert chosen_pairs(np.array([1.0, 0.01])) == [1]
    assert chosen_pairs(np.array([1.0, 0.2, 0.03, 0.0])) == [2, 1, 0]
    assert chosen_pairs(np.zeros(3)) == []


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "geometry",
    [
        {"head_dim": 128},
        {"head_dim": 128, "rope_theta": 5e5, "window": 8192},
        {"head_dim": 64, "rotary_dim": 16, "window": 2048},
        {"head_dim": 4},
        {"head_dim": 32, "window": 256, "still_pairs": 4},
    ],
    ids=["llama-2", "llama-3", "partial", "two-pairs", "still"],
)
@pytest.mark.parametrize("methods", [(), TEN], ids=["none", "ten"])
def test_no_texts_overlap(study, geometry, methods):
    suited = [name for name in methods if geometry["head_dim"] > 4 or name not in ("ntk", "abf")]
    assert no_texts_touch(figure(study(*suited, **geometry)))


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("geometry", [{"head_dim": 2}, {"head_dim": 4, "still_pairs": 2}])
def test_one_pair_and_none_that_turns_can_be_drawn(study, tmp_path, geometry):
    made = study("nope", "rerope", **geometry)
    style.save(figure(made), tmp_path / "plot.svg")
    assert "score" in printed(chart(made))
    if geometry.get("still_pairs"):
        line = labelled(figure(made).axes[1])["pretrained: never negative here"]
        np.testing.assert_array_equal(line.get_ydata(), 4.0)


def printed(renderable, width=100):
    console = Console(width=width, record=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_what_is_left_out_is_said(study):
    note = figure(study("yarn", "lm-infinite")).get_supxlabel().replace("\n", " ")
    assert "attention factors, which multiply all scores of a method alike, are left out" in note
    assert "lm-infinite ×8: the score at the distance that the last of 32768 tokens sees" in note
    plain = figure(study("linear")).get_supxlabel()
    assert "attention factors" not in plain
    assert "sees" not in plain


def test_the_terminal_has_both_ranges(study):
    made = study("yarn", "lm-infinite")
    text = printed(chart(made))
    stop = far_stop(made)
    last = envelope(made.ropes["yarn ×8"], stop, made.target, 90)
    assert f"yarn ×8: {last.mean[-1]:.1f} at {last.distances[-1]:.0f}" in text
    assert "near: to the effective range" in text.replace("\n", " ")
    assert "far: to the longest wavelength" in text
    assert "longest wavelength (54410)" in text
    assert "yarn ×8 first negative at 8886" in " ".join(text.split())
    assert score(made.ropes["yarn ×8"].inv_freq, np.array([8885, 8886]))[1] < 0
    assert max(map(len, text.splitlines())) <= 100
