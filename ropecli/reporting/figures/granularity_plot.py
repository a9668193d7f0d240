"""Draws how scaling changes the granularity of positions: the embedding as a helix, and distances between images.

Source: Xiong et al. 2023 (arXiv:2309.16039), appendix B: figure 8, and "Multi-Objective Decision".
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.analysis.granularity import closest_images, distance_to_old_images, helix
from ropecli.checkpoint.inspection import Study
from ropecli.errors import DataError
from ropecli.reporting.figures import style
from ropecli.reporting.figures.frequencies_plot import remapping_notes, study_subject
from ropecli.scaling.spec import ScaledRope
from ropecli.table import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POSITIONS = np.arange(-5, 6)
"""Around 0, where the slower pair's sine increases; farther out, dots would hide each other."""
_MAX_PANELS, _COLUMNS = 8, 4
_BETA = 50.0
"""Beta of the paper's ABF, which halves the frequency of the pair in its figure."""
_LONGEST_LINE = 24 * math.pi
"""Maximum radians of the fastest pair; a longer helix would look like a solid tube."""


def draw_helix(study: Study) -> "Figure":
    """One panel per rope: the distance of adjacent positions. Raises DataError for more ropes than panels."""
    ropes = {name: rope for name, rope in study.ropes.items() if rope.remapping is None}
    if len(ropes) > _MAX_PANELS:
        raise DataError(
            f"{len(ropes)} helices are too many for one figure. Give up to {_MAX_PANELS - 1} --methods, or use "
            "--kind tradeoff."
        )
    # the pair whose frequency ABF with this β halves, β^(-2j/d) = 1/2; not the fastest one if there are others
    pairs = study.geometry.pairs
    pair = min(max(1, round(pairs * math.log(2) / math.log(_BETA))), pairs - 1)
    columns = min(_COLUMNS, len(ropes))
    rows = math.ceil(len(ropes) / columns)
    with style.drawing():
        figure = style.new_figure(max(7.0, 3.4 * columns), 3.9 * rows + 0.8)
        panels = figure.subplots(rows, columns, squeeze=False, subplot_kw={"projection": "3d"}).ravel()
        for axes, (name, rope) in zip(panels, ropes.items(), strict=False):
            _draw_helix(axes, clean(name), rope, pair)
        for axes in panels[len(ropes) :]:
            axes.remove()
        notes = [
            f"dots: positions t from {POSITIONS[0]} to {POSITIONS[-1]}; distances: Euclidean in these dimensions",
            f"pair {pair}: abf with beta {_BETA:g} comes closest to halving its frequency",
            *remapping_notes(study, "the helix is the pretrained one"),
        ]
        style.title(figure, f"Rotary embedding as a helix, {study_subject(study)}", notes)
    return figure


def _draw_helix(axes: Any, name: str, rope: ScaledRope, pair: int) -> None:
    """The helix, cut if too long, and darker at the dots."""
    fast, slow = float(rope.inv_freq[0]), float(rope.inv_freq[pair])
    longest = _LONGEST_LINE / fast if fast else 0.0
    whole = max(float(POSITIONS[-1]), min(math.pi / 2 / slow if slow else longest, longest))
    for end, look in ((whole, {"color": "#BBBBBB", "linewidth": 0.8}), (POSITIONS[-1], {"color": "black"})):
        axes.plot(*helix(rope.inv_freq, pair, np.linspace(-end, end, 1201)).T, **{"linewidth": 1.2, **look})
    dots = helix(rope.inv_freq, pair, POSITIONS)
    axes.plot(*dots.T, linestyle="", marker="o", markersize=5, color="#D55E00", markeredgecolor="black", mew=0.6)
    axes.set(xlim=(-1, 1), ylim=(-1, 1), zlim=(-1, 1), xticks=(-1, 0, 1), yticks=(0,), zticks=(-1, 0, 1))
    axes.tick_params(labelsize=7, pad=-2)
    axes.set_xlabel("cos θ₀t", labelpad=-2, fontsize=8)
    axes.set_ylabel("sin θ₀t", labelpad=3, fontsize=8)
    axes.set_zlabel(f"sin θ{str(pair).translate(str.maketrans('0123456789', '₀₁₂₃₄₅₆₇₈₉'))}t", labelpad=-8, fontsize=8)
    axes.view_init(elev=22, azim=-60)
    axes.set_box_aspect((1, 1, 1), zoom=0.88)
    apart = np.linalg.norm(dots[:, None] - dots[None], axis=-1)
    closest = [float(np.diagonal(apart, gap).min()) for gap in range(1, len(dots))]
    gap = int(np.argmin(np.round(closest, 9)))
    between = "adjacent" if gap == 0 else f"{gap + 1} positions apart"
    words = f"adjacent dots {np.diagonal(apart, 1).mean():.2f} apart\nclosest two {closest[gap]:.2f} ({between})"
    axes.set_title(f"{name}\n{words}", fontsize=8.5, y=0.96)


def draw_tradeoff(study: Study) -> "Figure":
    """Distance to pretrained images, d(f, f̂), against distance of the closest images, q(f̂): one point per rope.

    Raises DataError if the pretraining length is too long to compare all its images.
    """
    pretrained, target = study.geometry.inv_freq(), max(2, study.target)
    ropes = {clean(name): rope for name, rope in study.ropes.items() if rope.remapping is None}
    with style.drawing():
        figure, (axes,) = style.line_figure(list(ropes))
        for index, (name, rope) in enumerate(ropes.items()):
            distance = distance_to_old_images(pretrained, rope.inv_freq, study.original_length, target)
            if math.isnan(distance):
                raise DataError(
                    f"The pretraining length of {clean(study.checkpoint)}, {study.original_length} tokens, is too long "
                    "to compare all its images. Use --kind decay or wavelengths."
                )
            look = {**style.look(index), "linestyle": "", "markersize": 8, "fillstyle": "none", "mew": 1.6}
            axes.plot([distance], [closest_images(rope.inv_freq, target).distance], label=name, **look)
        # include 0, the value of some methods
        axes.set_xlim(left=-0.05 * axes.get_xlim()[1])
        axes.set_ylim(bottom=-0.05 * axes.get_ylim()[1])
        axes.set_xlabel("d(f, f̂), distance to pretrained images (smaller: closer to what was learned)")
        axes.set_ylabel("q(f̂), distance of the two closest images\n(larger: positions are easier to distinguish)")
        axes.set_title("↖ better", loc="left", fontsize=9, fontweight="bold")
        style.legend(axes)
        notes = [
            "image: a unit vector with equal weight in every pair, rotated to a position; distances are 0 to 2; "
            "pretrained: extrapolated to the target",
            *remapping_notes(study, "no point"),
        ]
        style.title(
            figure, f"Distance to pretrained images against distance between images, {study_subject(study)}", notes
        )
    return figure
