"""Draws tuning runs: perplexity at the target and the pretraining length against time."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.reporting.figures import style
from ropecli.reporting.tuning_tables import OVERFLOW, of_same_tokens, ppl_of, ppl_words, tuning_names, tuning_subject
from ropecli.reporting.wording import number
from ropecli.table import clean
from ropecli.tuning.task import TRAINING, Score, TuneReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOSSES = {"needle": ("loss on needles", "loss on needles"), "longppl": ("loss on key tokens", "loss")}
"""By objective: the loss at the target and at the pretraining length."""
_CEILING = 2.0
"""Upper limit of the axis, as a multiple of the lowest perplexity, so that the interesting range is visible."""
_UNITS = ((7200.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_LEVEL_DASHES = ((6, 3), (2, 4), (1, 2), (4, 2, 1, 2), (10, 2))


def draw_tuning(reports: Sequence[TuneReport]) -> "Figure":
    """One run: every measurement and the best so far. Several runs: the best so far and the result of each.

    Raises DataError for more reports than lines can look different.
    """
    names = tuning_names(reports)
    longest = max(sum(point.seconds for point in report.points) for report in reports)
    seconds, unit = next((size, name) for least, size, name in _UNITS if longest >= least)
    with style.drawing():
        levels = [name for at in ("target", "pretraining") for name in _levels(reports, at)]
        figure, panels = style.line_figure([f"{name}: overflowed" for name in names], levels, panels=2)
        above = False
        for axes, at in zip(panels, ("target", "pretraining"), strict=True):
            values: list[float] = []
            for index, (name, report) in enumerate(zip(names, reports, strict=True)):
                if len(reports) == 1:
                    values += _draw_points(axes, report, at, seconds)
                else:
                    values += _draw_way(axes, report, at, seconds, name, index)
            handles = axes.get_legend_handles_labels()[0]
            known = _levels(reports, at)
            low = min([value for value in [*values, *known.values()] if math.isfinite(value)])
            # the results are always inside the axis
            top = max(_CEILING * low, *(_ppl(report.score, at) for report in reports))
            for dashes, (words, value) in zip(_LEVEL_DASHES, known.items(), strict=False):
                label = words + " (off axis)" * (value > top)
                look: dict[str, Any] = {"color": style.GREY, "linewidth": 1.1, "linestyle": (0, dashes), "zorder": 1}
                handles.append(axes.axhline(min(value, 2 * top), label=label, **look))
            style.log_axis(axes.yaxis, [value for value in [*values, *known.values()] if value <= top])
            above |= any(value > top for value in values)
            lengths = {
                report.target_length if at == "target" else report.original_max_position_embeddings
                for report in reports
            }
            where = f"{lengths.pop()} tokens" if len(lengths) == 1 else f"the {at}"
            axes.set_ylabel(f"perplexity at {where},\nlogarithmic")
            style.legend(axes, handles)
        panels[-1].set_xlabel(f"elapsed {unit}, measurements and training")
        panels[-1].set_xlim(left=0)
        several = f"{len(reports)} tuning runs, best so far and result"
        what = several if len(reports) > 1 else f"Tuning ({names[0]})"
        style.title(figure, f"{what}: {tuning_subject(reports)}", _notes(reports, above))
    return figure


def best_so_far(report: TuneReport) -> list[int]:
    """Indices of the points with the lowest objective so far, among those on as many documents as the result."""
    kept: list[int] = []
    for index, point in enumerate(report.points):
        comparable = _finite(point.score) and point.score.documents == report.score.documents
        if comparable and (not kept or point.score.objective < report.points[kept[-1]].score.objective):
            kept.append(index)
    return kept


def _draw_points(axes: "Axes", report: TuneReport, at: str, unit: float) -> list[float]:
    """Draw every measurement, with one style per level and number of documents. Returns the perplexities drawn."""
    spent = np.cumsum([point.seconds for point in report.points]) / unit
    values = np.array([_ppl(point.score, at) for point in report.points])
    groups: dict[tuple[str, int], list[int]] = {}
    for place, point in enumerate(report.points):
        if _finite(point.score):
            groups.setdefault((point.level, point.score.documents), []).append(place)
    for index, ((level, documents), places) in enumerate(groups.items()):
        look = {**style.look(index), "linestyle": "-" if level in TRAINING else "none"}
        # hollow: measured on other documents than the result
        look["markerfacecolor"] = look["color"] if documents == report.score.documents else "white"
        label = f"{clean(level, 20)}, {documents} document{'s'[: documents != 1]}"
        axes.plot(spent[places], values[places], label=label, **look)
    kept = best_so_far(report)
    if kept:
        # pale and wide, behind the points
        look = {"color": "#c4c4c4", "linewidth": 5, "zorder": 1.5, "drawstyle": "steps-post"}
        label = f"best so far, on {report.score.documents} documents"
        axes.plot([*spent[kept], spent[-1]], [*values[kept], values[kept[-1]]], label=label, **look)
    return [float(value) for places in groups.values() for value in values[places]]


def _draw_way(axes: "Axes", report: TuneReport, at: str, unit: float, name: str, index: int) -> list[float]:
    """Draw the best so far, and the result as a marker at the end. Returns the perplexities drawn."""
    spent = np.cumsum([point.seconds for point in report.points]) / unit
    kept = best_so_far(report)
    values = [*(_ppl(report.points[place].score, at) for place in kept), _ppl(report.score, at)]
    look = {**style.look(index), "drawstyle": "steps-post", "markevery": [len(kept)]}
    axes.plot([*spent[kept], spent[-1]], values, label=f"{name}: {number(values[-1])}", **look)
    return values


def _levels(reports: Sequence[TuneReport], at: str) -> dict[str, float]:
    """Reference perplexities by name; for several runs, those that all share.

    Both panels show the pretrained model at its pretraining length, the reference for an extension.
    """
    of_each = []
    for report in reports:
        original_length, target = report.original_max_position_embeddings, report.target_length
        states = [(f"as pretrained, at {original_length} tokens", report.base.pretraining)]
        if at == "target" and target != original_length:
            states.append((f"as pretrained, at {target} tokens", report.base.target))
        states.append((clean(report.untuned_name, 60), getattr(report.untuned, at)))
        if len(reports) == 1:
            trained = report.level in TRAINING
            states += [("best constants", getattr(report.start, at))] * trained
            states.append(("result" + f", after {report.step:,} steps" * trained, getattr(report.score, at)))
        of_each.append({f"{name}: {ppl_words(nll)}": ppl_of(nll) for name, nll in states})
    shared = of_same_tokens(reports)
    return {name: value for name, value in of_each[0].items() if shared and all(name in known for known in of_each)}


def _notes(reports: Sequence[TuneReport], above: bool) -> list[str]:
    notes = []
    if len(reports) == 1:
        (report,) = reports
        weight = report.settings.get("short_weight")
        share = f"{weight:g}" if isinstance(weight, int | float) else "short_weight"
        long, short = _LOSSES.get(report.settings.get("objective", "ppl"), ("loss", "loss"))
        at_target = f"{long} at {report.target_length} tokens"
        notes.append(f"objective: {at_target} + {share} × {short} at the pretraining length")
        if any(point.score.documents != report.score.documents for point in report.points if _finite(point.score)):
            notes.append("hollow: measured on other documents than the result, not comparable")
    overflowed = sum(not _finite(point.score) for report in reports for point in report.points)
    if overflowed:
        notes.append(f"not shown: {overflowed:,} measurements that overflowed")
    if not of_same_tokens(reports):
        notes.append("different checkpoints, data or lengths: the perplexities are not comparable")
    return [*notes, *[f"not shown: perplexities above {_CEILING:g} times the lowest"] * above]


def _finite(score: Score) -> bool:
    return max(score.target, score.pretraining, score.objective) < OVERFLOW


def _ppl(score: Score, at: str) -> float:
    return ppl_of(score.target if at == "target" else score.pretraining)
