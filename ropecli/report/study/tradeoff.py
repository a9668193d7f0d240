"""What a scaling has to weigh: images near to those that were learned, and images of positions far from each other.

Source: Xiong et al. 2023 (arXiv:2309.16039), appendix B, "Multi-Objective Decision": d(f, f̂) against q(f̂).
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ropecli.checkpoint.study import Study
from ropecli.errors import DataError
from ropecli.report.charts import Chart, Series
from ropecli.report.plots import style
from ropecli.report.plots.labels import name_points
from ropecli.report.study.by_pair import remapping_notes, subject
from ropecli.report.wording import clean
from ropecli.theory.images import closest_images, distance_to_old_images

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

X_LABEL = "distance to old images (smaller: nearer to what was learned)"
Y_LABEL = "distance of the two closest images (larger: positions are told apart better)"


class Point(NamedTuple):
    """old: d(f, f̂). closest: q(f̂). gap: how many tokens apart the two closest images are."""

    old: float
    closest: float
    gap: int


def points(study: Study) -> dict[str, Point]:
    """By rope, at the target; not of those that remap distances, whose images are the pretrained ones.

    Raises DataError for a window so long that the images of all its positions are not looked through.
    """
    found = {}
    old, window, target = study.geometry.inv_freq(), study.window, max(2, study.target)
    for name, rope in study.ropes.items():
        if rope.remapping is None:
            distance = distance_to_old_images(old, rope.inv_freq, window, target)
            if math.isnan(distance):
                raise DataError(
                    f"The pretraining window of {clean(study.checkpoint)} is {window} tokens, too many for the "
                    "distance to old images, which looks through all of them. Use --kind decay or wavelengths."
                )
            found[name] = Point(distance, *closest_images(rope.inv_freq, target))
    return found


def figure(study: Study) -> "Figure":
    """Raises DataError as `points`."""
    found = points(study)
    with style.drawing():
        figure = style.new_figure(8.5, 6.2)
        axes = figure.subplots()
        for index, (name, point) in enumerate(found.items()):
            look = {**style.look(index), "linestyle": "", "markersize": 8, "fillstyle": "none", "markeredgewidth": 1.6}
            axes.plot([point.old], [point.closest], label=clean(name), **look)
        for which, values in (
            ("x", [one.old for one in found.values()]),
            ("y", [one.closest for one in found.values()]),
        ):
            _limit(axes, which, max(values))
        axes.set_xlabel(f"d(f, f̂), {X_LABEL}")
        axes.set_ylabel(f"q(f̂), {Y_LABEL}".replace(" (", "\n("))
        axes.set_title("↖ better", loc="left", fontsize=9, fontweight="bold")
        style.title(figure, _title(study), _notes(study))
        name_points(figure, axes, {clean(name): (point.old, point.closest) for name, point in found.items()})
    return figure


def chart(study: Study) -> "RenderableType":
    """Raises DataError as `points`."""
    from rich.console import Group
    from rich.text import Text

    found = points(study)
    scatter = Chart(
        title=_title(study),
        x_label=X_LABEL,
        y_label=Y_LABEL,
        series=[Series(name, [(point.old, point.closest)]) for name, point in found.items()],
        logarithmic=False,
        shown="{:.4f} between the two closest".format,
        x_logarithmic=False,
        shown_x="{:.4f} from the old".format,
        notes=[f"{note}." for note in ("better: up and left", *_notes(study))],
    )
    return Group(scatter, *(Text(f"{words}.") for words in _far_apart(found)))


def _far_apart(found: Mapping[str, Point]) -> list[str]:
    """Of which ropes the two closest images are not those of neighbours."""
    far = [f"{clean(name)} {point.gap} tokens" for name, point in found.items() if point.gap > 1 and point.closest > 0]
    return [f"the two closest images are not of neighbours, but apart by: {', '.join(far)}"] if far else []


def _title(study: Study) -> str:
    return f"Images near to the old ones against images far from each other, {subject(study)}"


def _notes(study: Study) -> list[str]:
    return [
        "distances between images of a unit vector with the same weight in every pair, 0 to 2; pretrained: "
        "extrapolated to the target",
        *remapping_notes(study, "no images of their own, and no point"),
    ]


def _limit(axes: "Axes", which: str, largest: float) -> None:
    """From 0, which some methods have, with room around the points."""
    largest = largest or 1.0
    (axes.set_xlim if which == "x" else axes.set_ylim)(-0.05 * largest, 1.1 * largest)
