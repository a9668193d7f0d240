"""The gains and phases that were learned: a map of heads and pairs for each layer, or a summary by layer of many.

The darker, the farther from none; what is below none is hatched, so that the sign is seen without colours.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.report.plots import style
from ropecli.report.study.by_pair import X_LABEL
from ropecli.report.tuned.course import names_of, subject
from ropecli.report.tuned.layers import Layer, layers_of
from ropecli.tune.record import TuneReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_MOST_MAPS = 8
"""Layers; of more, a summary stands above the maps of those that changed most."""
_MAPS = 4
_LEAST = 0.01
"""The scale's end is at least so far from none: less than that is nothing learned."""
_COLOURS = "RdBu_r"
"""Both its ends are dark, and equally so."""
_MOST_NUMBERS = 5
"""Beside a scale."""


def figure(reports: Sequence[TuneReport]) -> "Figure":
    """Raises DataError for several reports, and for one without gains."""
    layers = layers_of(reports)
    many = len(layers) > _MOST_MAPS
    shown = _most_changed(layers) if many else layers
    phases = any(layer.phase is not None for layer in layers)
    heights = [2.0] * many + [_height(layer) for layer in shown]
    with style.drawing():
        drawn = style.new_figure(9.5 if phases else 6.0, 1.9 + sum(heights) + 0.25 * len(heights))
        panels = drawn.subplots(len(heights), 1 + phases, squeeze=False, height_ratios=heights)
        if many:
            _draw_summary(panels[0], layers, phases)
        maps = panels[int(many) :]
        for row, layer in zip(maps, shown, strict=True):
            row[0].set_ylabel(f"layer {layer.name}\n{_heads(layer)}")
        _draw_maps([row[0] for row in maps], [layer.log_gain for layer in shown], layers, "gain")
        if phases:
            _draw_maps([row[1] for row in maps], [layer.phase for layer in shown], layers, "phase")
        style.title(drawn, _title(reports), _notes(reports[0], layers, shown))
    return drawn


def chart(reports: Sequence[TuneReport]) -> "RenderableType":
    """By pair as lines, by layer as a table. Raises DataError as figure does."""
    from rich.console import Group
    from rich.text import Text

    from ropecli.report.charts import Chart, Series
    from ropecli.report.fitting import numbers_table

    layers = layers_of(reports)
    lines = {"mean |log gain|": _by_pair([layer.log_gain for layer in layers])}
    if any(layer.phase is not None for layer in layers):
        lines["mean |phase| (radians)"] = _by_pair([layer.phase for layer in layers])
    series = [
        Series(name, [(float(pair), float(value)) for pair, value in enumerate(values)], dense=len(values) > 16)
        for name, values in lines.items()
    ]
    return Group(
        Chart(
            title=_title(reports),
            x_label=X_LABEL,
            y_label="mean over heads and layers",
            series=series,
            logarithmic=False,
            shown="{:.3g}".format,
            x_logarithmic=False,
            shown_x="pair {:.0f}".format,
            notes=[_temperature_note(reports[0])],
        ),
        Text(""),
        numbers_table(*summary_of(layers)),
    )


def summary_of(layers: Sequence[Layer]) -> tuple[list[str], list[list[str]]]:
    """(heads, cells of each layer)."""
    heads = ["layer", "mean |log gain|", "gain", "mean |phase|", "phase (radians)"]
    rows = []
    for layer in layers:
        gain = np.exp(layer.log_gain)
        row = [layer.name, f"{np.abs(layer.log_gain).mean():.3f}", f"{gain.min():.3g} to {gain.max():.3g}"]
        if layer.phase is None:
            row += ["–", "–"]
        else:
            row += [f"{np.abs(layer.phase).mean():.3f}", f"{layer.phase.min():+.3f} to {layer.phase.max():+.3f}"]
        rows.append(row)
    return heads, rows


def _most_changed(layers: Sequence[Layer]) -> list[Layer]:
    """In the layers' order."""
    kept = sorted(range(len(layers)), key=lambda index: -layers[index].change)[:_MAPS]
    return [layers[index] for index in sorted(kept)]


def _by_pair(values: Sequence[np.ndarray | None]) -> np.ndarray:
    """Mean magnitude over heads and those layers that have the pair, shape (pairs of the widest layer,)."""
    known = [np.abs(one) for one in values if one is not None]
    pairs = max(one.shape[1] for one in known)
    return np.array([np.concatenate([one[:, at] for one in known if one.shape[1] > at]).mean() for at in range(pairs)])


def _height(layer: Layer) -> float:
    """Of a map, inches."""
    return float(np.clip(0.16 * len(layer.log_gain), 0.75, 2.6))


def _heads(layer: Layer) -> str:
    return "all heads" if len(layer.log_gain) == 1 else "query head"


def _draw_summary(panels: Sequence["Axes"], layers: Sequence[Layer], phases: bool) -> None:
    """How far the gains and the phases of each layer are from none, on the average."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    values = {"mean |log gain|": [layer.log_gain for layer in layers]}
    if phases:
        values["mean |phase| (radians)"] = [
            np.array([np.nan]) if layer.phase is None else layer.phase for layer in layers
        ]
    every = -(-len(layers) // 12)
    for index, (axes, (name, some)) in enumerate(zip(panels, values.items(), strict=False)):
        means = [float(np.abs(one).mean()) for one in some]
        axes.plot(range(len(layers)), means, label=name, **{**style.look(index), "markersize": 3.5})
        axes.set_ylim(0, 1.1 * (np.nanmax(means) or _LEAST))
        axes.set_ylabel(name)
        axes.set_xlabel("layer")
        axes.xaxis.set_major_locator(FixedLocator(range(0, len(layers), every)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: layers[int(at)].name))


def _draw_maps(
    panels: Sequence["Axes"], values: Sequence[np.ndarray | None], layers: Sequence[Layer], what: str
) -> None:
    """One below the other, with one scale for all. what: gain or phase."""
    everything = [layer.log_gain if what == "gain" else layer.phase for layer in layers]
    end = max(_LEAST, *(float(np.abs(one).max()) for one in everything if one is not None))
    images = [_draw_map(axes, one, end) for axes, one in zip(panels, values, strict=True)]
    panels[-1].set_xlabel(X_LABEL)
    image = next((one for one in images if one is not None), None)
    if image is None:
        return
    bar = panels[0].figure.colorbar(image, ax=list(panels), location="top", shrink=0.9, aspect=35, pad=0.02)
    ticks = np.linspace(-end, end, _MOST_NUMBERS)
    shown = np.exp(ticks) if what == "gain" else ticks
    bar.set_ticks(ticks.tolist(), labels=[f"{one:.3g}" for one in shown])
    bar.set_label("gain, logarithmic (hatched: below 1)" if what == "gain" else "phase, radians (hatched: below 0)")


def _draw_map(axes: "Axes", values: np.ndarray | None, end: float) -> Any:
    """values: shape (heads, pairs)."""
    from matplotlib.ticker import MaxNLocator

    axes.grid(False)
    axes.spines[:].set_visible(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(7, integer=True, min_n_ticks=1, steps=[1, 2, 4, 5, 10]))
    if values is None:
        axes.text(0.5, 0.5, "no phase: all heads share a norm", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return None
    image = axes.imshow(values, cmap=_COLOURS, vmin=-end, vmax=end, aspect="auto", interpolation="nearest")
    _hatch(axes, values < 0)
    if len(values) == 1:
        axes.set_yticks([])
    return image


def _hatch(axes: "Axes", cells: np.ndarray) -> None:
    """As one shape, so that thousands of cells stay a small file."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners = [(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5), (-0.5, -0.5)]
    found = np.argwhere(cells)[:, None, ::-1] + np.array(corners)
    if len(found):
        codes = [Path.MOVETO, *[Path.LINETO] * (len(corners) - 2), Path.CLOSEPOLY]
        shape = Path(found.reshape(-1, 2), np.tile(np.array(codes, dtype=np.uint8), len(found)))
        axes.add_patch(PathPatch(shape, facecolor="none", edgecolor="#9a9a9a", linewidth=0, hatch="////"))


def _title(reports: Sequence[TuneReport]) -> str:
    return f"Learned gains and phases, {names_of(reports)[0]}: {subject(reports)}"


def _temperature_note(report: TuneReport) -> str:
    return f"all gains are multiplied by a common {np.exp(report.log_temperature):.4g} besides (the temperature)"


def _notes(report: TuneReport, layers: Sequence[Layer], shown: Sequence[Layer]) -> list[str]:
    notes = [_temperature_note(report)]
    if len(shown) < len(layers):
        notes.append(f"maps of the {len(shown)} layers of {len(layers)} that changed most, on the scale of all")
    return notes
