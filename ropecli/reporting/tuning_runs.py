"""Tables and the plot of tuning runs."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ropecli.errors import DataError
from ropecli.reporting.figures import style
from ropecli.reporting.wording import duration, number
from ropecli.table import Table, clean
from ropecli.tuning.task import Score, TuneReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OVERFLOW = 700.0
"""Nats; perplexity overflows float64 above this."""
_CEILING = 2.0
"""Upper limit of the axis, as a multiple of the lowest perplexity, so that the interesting range is visible."""
_UNITS = ((7200.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_LEVEL_DASHES = ((6, 3), (2, 4), (1, 2), (4, 2, 1, 2), (10, 2))


def tuning_table(report: TuneReport) -> Table:
    """Scores as pretrained, with default constants, with the best constants, and after tuning."""
    original_length, target = report.original_max_position_embeddings, report.target_length
    trains, method, level = report.level == "heads", tuned_method(report), clean(report.level, 20)
    rows = [_row("as pretrained", report.base), _row(clean(report.untuned_name, 60), report.untuned)]
    if trains:
        spent = sum(point.seconds for point in report.points if point.level != "heads")
        rows.append(_row(f"{method}, best constants", report.start, "0", duration(spent)))
    result = f"{method}, tuned ({level}{f', step {report.step}' * trains})"
    notes = []
    if trains and report.step:
        notes = [
            f"Rounding the weights to their saved dtype changes the logits by {report.rounding:.1g} of the largest one."
        ]
    elif trains:
        result = f"{method}, {level} found nothing better"
        notes = [f"{level} did not improve on the best constants; only these are written."]
    rows.append(_row(result, report.score, f"{report.learned:,}", duration(report.seconds)))
    scored = f"the last {report.settings.get('targets')} tokens of {report.score.documents} calibration documents"
    title = f"{clean(report.checkpoint)}: scores of {scored} of "
    heads = ["model", f"perplexity at {original_length}", f"at {target}", "learned parameters", "time"]
    table = Table(title + clean(report.source), heads, rows, notes)
    return table if original_length != target else table.only(*heads[:2], *heads[3:])


def tuning_runs(reports: Sequence[TuneReport]) -> Table:
    """One row per run: its result."""
    heads = ["run", "perplexity at the pretraining length", "at the target", "learned parameters", "time", "documents"]
    several = len({report.digest for report in reports}) > 1
    rows = []
    for report in reports:
        name = f"{clean(report.checkpoint, 40)}, " * several + f"{clean(report.level, 20)}, {tuned_method(report)}"
        results = _row(name, report.score, f"{report.learned:,}", duration(report.seconds))
        rows.append([*results, f"{report.score.documents}"])
    keys = ("digest", "fingerprint", "target_length", "original_max_position_embeddings")
    tokens = {(*(getattr(report, key) for key in keys), report.score.documents) for report in reports}
    warning = "Different checkpoints, data or lengths: the perplexities are not comparable."
    return Table("Comparison of tuning runs", heads, rows, [warning] if len(tokens) > 1 else [])


def _row(name: str, score: Score, learned: str = "–", spent: str = "–") -> list[str]:
    return [name, ppl_words(score.pretraining), ppl_words(score.target), learned, spent]


def ppl_words(nll: float) -> str:
    """Format the perplexity of a loss in nats."""
    return number(math.exp(nll)) if nll < OVERFLOW else "overflowed"


def tuned_method(report: TuneReport) -> str:
    return f"{clean(report.method, 30)} ×{report.factor:g}"


def draw_tuning(reports: Sequence[TuneReport]) -> "Figure":
    """Every measurement of one run, and the best so far. Raises DataError for several runs."""
    if len(reports) > 1:
        raise DataError(f"One plot cannot show {len(reports)} tuning runs. Compare them with `ropecli report`.")
    (report,) = reports
    spent = np.cumsum([point.seconds for point in report.points])
    seconds, unit = next((size, name) for least, size, name in _UNITS if spent[-1] >= least)
    with style.drawing():
        levels = [name for at in ("target", "pretraining") for name in _levels(report, at)]
        labels = [f"best so far, on {report.score.documents} documents"] * 4
        figure, panels = style.line_figure(labels, levels, panels=2)
        lengths = (report.target_length, report.original_max_position_embeddings)
        above = False
        for axes, at, length in zip(panels, ("target", "pretraining"), lengths, strict=True):
            values = _draw_points(axes, report, at, spent / seconds)
            handles = axes.get_legend_handles_labels()[0]
            known = _levels(report, at)
            shown = [*values, *known.values()]
            # the result is always inside the axis
            top = max(_CEILING * min(value for value in shown if math.isfinite(value)), _ppl(getattr(report.score, at)))
            for dashes, (words, value) in zip(_LEVEL_DASHES, known.items(), strict=False):
                label = words + " (off axis)" * (value > top)
                look: dict[str, Any] = {"color": style.GREY, "linewidth": 1.1, "linestyle": (0, dashes), "zorder": 1}
                handles.append(axes.axhline(min(value, 2 * top), label=label, **look))
            style.log_axis(axes.yaxis, [value for value in shown if value <= top])
            above |= any(value > top for value in values)
            axes.set_ylabel(f"perplexity at {length} tokens,\nlogarithmic")
            style.legend(axes, handles)
        panels[-1].set_xlabel(f"elapsed {unit}, measurements and training")
        panels[-1].set_xlim(left=0)
        subject = f"{clean(report.checkpoint)}, calibration data {clean(report.source)}"
        style.title(
            figure, f"Tuning ({clean(report.level, 20)}, {tuned_method(report)}): {subject}", _notes(report, above)
        )
    return figure


def _draw_points(axes: "Axes", report: TuneReport, at: str, spent: np.ndarray) -> list[float]:
    """Draw every measurement, with one style per level and number of documents. Returns the perplexities drawn."""
    values = np.array([_ppl(getattr(point.score, at)) for point in report.points])
    groups: dict[tuple[str, int], list[int]] = {}
    best: list[int] = []
    for place, point in enumerate(report.points):
        score = point.score
        if _finite(score):
            groups.setdefault((point.level, score.documents), []).append(place)
            lower = not best or score.objective < report.points[best[-1]].score.objective
            best += [place] * (lower and score.documents == report.score.documents)
    for index, ((level, documents), places) in enumerate(groups.items()):
        look = {**style.look(index), "linestyle": "-" if level == "heads" else "none"}
        # hollow: measured on other documents than the result
        look["markerfacecolor"] = look["color"] if documents == report.score.documents else "white"
        label = f"{clean(level, 20)}, {documents} document{'s'[: documents != 1]}"
        axes.plot(spent[places], values[places], label=label, **look)
    if best:
        # pale and wide, behind the points
        look = {"color": "#c4c4c4", "linewidth": 5, "zorder": 1.5, "drawstyle": "steps-post"}
        label = f"best so far, on {report.score.documents} documents"
        axes.plot([*spent[best], spent[-1]], [*values[best], values[best[-1]]], label=label, **look)
    return [float(value) for places in groups.values() for value in values[places]]


def _levels(report: TuneReport, at: str) -> dict[str, float]:
    """Reference perplexities by name.

    Both panels show the pretrained model at its pretraining length, the reference for an extension.
    """
    original_length, target = report.original_max_position_embeddings, report.target_length
    trained = report.level == "heads"
    states = [(f"as pretrained, at {original_length} tokens", report.base.pretraining)]
    if at == "target" and target != original_length:
        states.append((f"as pretrained, at {target} tokens", report.base.target))
    states.append((clean(report.untuned_name, 60), getattr(report.untuned, at)))
    states += [("best constants", getattr(report.start, at))] * trained
    states.append(("result" + f", after {report.step:,} steps" * trained, getattr(report.score, at)))
    return {f"{name}: {ppl_words(nll)}": _ppl(nll) for name, nll in states}


def _notes(report: TuneReport, above: bool) -> list[str]:
    share, at_target = report.settings.get("short_weight", "short_weight"), f"{report.target_length} tokens"
    notes = [f"objective: loss at {at_target} + {share} × loss at the pretraining length"]
    if any(point.score.documents != report.score.documents for point in report.points if _finite(point.score)):
        notes.append("hollow: measured on other documents than the result, not comparable")
    if overflowed := sum(not _finite(point.score) for point in report.points):
        notes.append(f"not shown: {overflowed:,} measurements that overflowed")
    return [*notes, *[f"not shown: perplexities above {_CEILING:g} times the lowest"] * above]


def _finite(score: Score) -> bool:
    return max(score.target, score.pretraining, score.objective) < OVERFLOW


def _ppl(nll: float) -> float:
    """Infinite if it overflows."""
    return math.exp(nll) if nll < OVERFLOW else math.inf
