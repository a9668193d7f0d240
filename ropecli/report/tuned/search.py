"""How a tuning run went: perplexity at the target and at the window against what it cost; one run, or several."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ropecli.errors import DataError
from ropecli.report.plots import style
from ropecli.report.tuned.course import (
    Course,
    Level,
    comparable,
    levels,
    names_of,
    objective_note,
    ppl,
    shown,
    subject,
)
from ropecli.report.wording import clean
from ropecli.tune.record import TuneReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_PANELS = ("target", "window")
_MANY = 200
"""Points; the markers of more are smaller."""
_DENSE = 30
"""Points; of more, the terminal shows dots and a letter here and there."""
_SHORTEST = 1e-3
"""Share of the longest time that a logarithmic axis begins at."""
_UNITS = ((7200.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
_CEILING = 2.0
"""Times the lowest perplexity. What lies above would press together what a search is about."""
_DASHES = {"base": (6, 3), "base at target": (2, 4), "plain": (1, 2), "begun": (4, 2, 1, 2), "result": (10, 2)}
"""Of the horizontal lines."""
_SHARED = ("base", "base at target", "plain")
"""States that are no run's own."""


def figure(reports: Sequence[TuneReport]) -> "Figure":
    """Raises DataError for more reports than lines look different."""
    if len(reports) > style.MOST_LINES:
        raise DataError(f"{len(reports)} tuning runs are too many for one plot; give at most {style.MOST_LINES}.")
    courses = [Course(report) for report in reports]
    unit, name = _unit(courses)
    with style.drawing():
        drawn = style.new_figure(10.5, 7.4 if len(reports) < 8 else 7.4 + 0.2 * len(reports))
        panels = drawn.subplots(2, 1, sharex=True)
        notes = []
        for axes, at in zip(panels, _PANELS, strict=True):
            draw = _draw_one if len(reports) == 1 else _draw_several
            notes += draw(axes, courses, at, unit)
            axes.set_ylabel(f"perplexity at {_length(reports, at)},\nlogarithmic")
        scale = ", logarithmic" if len(reports) > 1 else ""
        panels[-1].set_xlabel(f"{name} of all measurements so far, with the training between them{scale}")
        style.title(drawn, _title(reports), [*dict.fromkeys([*notes, *_notes(courses)])])
    return drawn


def chart(reports: Sequence[TuneReport]) -> "RenderableType":
    """At the target."""
    from ropecli.report.charts import Chart, Series

    courses = [Course(report) for report in reports]
    unit, name = _unit(courses)
    known = _levels_of(reports, "target")
    top = _top(courses, "target", known)
    several = len(courses) > 1
    lines = _lines_of_several(courses) if several else _lines_of_one(courses[0])
    least = _longest(courses) * _SHORTEST if several else 0.0
    over = [f"above all that is drawn: {level.words}" for level in known if level.ppl > top]
    series = []
    for line in lines:
        places = np.maximum(line.seconds, least) / unit
        points = list(zip(places.tolist(), _below(line.values, top).tolist(), strict=True))
        # a gap after each, so that what is no line is not drawn as one
        points = points if line.joined else [one for x, y in points for one in ((x, y), (x, math.nan))]
        if any(not math.isnan(y) for _, y in points):
            series.append(Series(line.name, points, line.dense))
        elif several:
            over.append(f"above all that is drawn: {line.name}: {shown(float(line.values[-1]))}")
    return Chart(
        title=_title(reports),
        x_label=f"{name} of all measurements so far{', logarithmic' if several else ''}",
        y_label=f"perplexity at {_length(reports, 'target')}",
        series=series,
        logarithmic=True,
        shown=shown,
        x_logarithmic=several,
        shown_x=lambda at: f"{at:.4g} {name}",
        levels=[(level.ppl, level.words) for level in sorted(known, key=lambda one: -one.ppl) if level.ppl <= top],
        notes=[*over, *_above(courses, "target", top, "not drawn"), *_notes(courses)],
    )


class _Line(NamedTuple):
    """Of the chart. seconds, values: shape (points,). joined: whether it is one line, and not single points."""

    name: str
    seconds: np.ndarray
    values: np.ndarray
    dense: bool
    joined: bool


def _lines_of_one(course: Course) -> list[_Line]:
    """The groups, the best so far, and the result."""
    lines = []
    for group in course.groups():
        at = group.indices
        # a chart tells where its lines end, and these are none
        name = group.name if group.training or len(at) == 1 else f"{group.name}; the last"
        lines.append(_Line(name, course.seconds[at], course.target[at], len(at) > _DENSE, group.training))
    if len(course.best_so_far()):
        lines.append(_Line(_best_name(course), *_steps(course, "target"), dense=True, joined=True))
    return [*lines, _Line("result", *_result(course, "target"), dense=False, joined=True)]


def _lines_of_several(courses: Sequence[Course]) -> list[_Line]:
    """The best so far of each, and its result at the end."""
    lines = []
    for name, course in zip(names_of([course.report for course in courses]), courses, strict=True):
        seconds, values = _way(course, "target")
        ends = np.append(seconds, course.seconds[-1:]), np.append(values, _result(course, "target")[1])
        lines.append(_Line(name, *ends, dense=True, joined=True))
    return lines


def _draw_one(axes: "Axes", courses: Sequence[Course], at: str, unit: float) -> list[str]:
    """Every measurement, the best so far, and the states that it is held against. Returns notes."""
    (course,) = courses
    known = _levels_of([course.report], at)
    top = _top(courses, at, known)
    values = _values(course, at)
    handles = _draw_groups(axes, course, values, top, unit)
    seconds, best = _steps(course, at)
    if len(best):
        # pale and broad, below the points that it goes through
        look: dict[str, Any] = {"color": "#c4c4c4", "linewidth": 5, "zorder": 1.5, "label": _best_name(course)}
        handles += axes.plot(seconds / unit, _below(best, top), **look)
    x, y = _result(course, at)
    ring: dict[str, Any] = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": "#000000"}
    axes.plot(x / unit, _below(y, top), label="_result", linestyle="none", zorder=4, **ring)
    handles += [_mark(axes, level, top) for level in known]
    _mark_above(axes, course.seconds[course.finite] / unit, values[course.finite], top)
    _value_axis(axes, [values[course.finite], best, y], known, top)
    # from 0 on, and with room for the ring
    axes.set_xlim(0, 1.04 * _longest([course]) / unit)
    style.legend(axes, handles, [str(handle.get_label()) for handle in handles])
    return _above(courses, at, top, "marked at the edge (^)")


def _draw_groups(axes: "Axes", course: Course, values: np.ndarray, top: float, unit: float) -> list[Any]:
    """Hollow markers for those on fewer documents; what is trained as a line."""
    handles = []
    for index, group in enumerate(course.groups()):
        look: dict[str, Any] = {**style.look(index), "markersize": 5 if len(values) <= _MANY else 2.5}
        look["linestyle"] = "-" if group.training else "none"
        look["markerfacecolor"] = look["color"] if group.whole else "white"
        at, y = course.seconds[group.indices] / unit, values[group.indices]
        handles += axes.plot(at, _below(y, top), label=group.name, **look)
    return handles


def _draw_several(axes: "Axes", courses: Sequence[Course], at: str, unit: float) -> list[str]:
    """The best so far of each run, and its result as a marker. Returns notes."""
    from matplotlib.lines import Line2D

    reports = [course.report for course in courses]
    known = _levels_of(reports, at)
    top = _top(courses, at, known)
    longest = _longest(courses) / unit
    handles: list[Any] = []
    ways = []
    for index, (course, name) in enumerate(zip(courses, names_of(reports), strict=True)):
        look = style.look(index)
        seconds, best = _way(course, at)
        x, y = _result(course, at)
        axes.plot(
            np.maximum(seconds / unit, longest * _SHORTEST), _below(best, top), label="_best", **{**look, "marker": ""}
        )
        alone = {**look, "linestyle": "none", "markersize": 8}
        axes.plot(np.maximum(x / unit, longest * _SHORTEST), _below(y, top), label=name, **alone)
        handles.append(Line2D([], [], label=f"{name}: {shown(float(y[0]))}", **look))
        ways.append(np.append(best, y))
    handles += [_mark(axes, level, top) for level in known]
    _value_axis(axes, ways, known, top)
    axes.set_xscale("log")
    _plain_numbers(axes, longest)
    style.legend(axes, handles, [str(handle.get_label()) for handle in handles])
    return _above(courses, at, top, "marked at the edge (^)")


def _plain_numbers(axes: "Axes", longest: float) -> None:
    """On the logarithmic axis of time."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    from ropecli.report.ticks import round_numbers
    from ropecli.report.wording import told_apart

    left = max(axes.get_xlim()[0], longest * _SHORTEST / 1.2)
    axes.set_xlim(left, longest * 1.2)
    ticks = round_numbers(left, longest * 1.2, 9)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter(told_apart(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())


def _levels_of(reports: Sequence[TuneReport], at: str) -> list[Level]:
    """Of one run all; of several those that they share."""
    if len(reports) == 1:
        return levels(reports[0], at)
    if not comparable(reports):
        return []
    first, *others = [levels(report, at) for report in reports]
    return [level for level in first if level.kind in _SHARED and all(level in other for other in others)]


def _way(course: Course, at: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a run among others; none of one that reads other documents than its result is scored on."""
    return _steps(course, at) if course.whole else (np.empty(0), np.empty(0))


def _steps(course: Course, at: str) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, perplexity) of the best so far, level until the next and to the end."""
    kept = course.best_so_far()
    values = _values(course, at)[kept]
    seconds = np.append(course.seconds[kept], course.seconds[-1:] if len(kept) else [])
    return np.repeat(seconds, 2)[1:-1], np.repeat(values, 2)


def _result(course: Course, at: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the result was measured; at the end where no point is the result's."""
    score = course.report.score
    same = [index for index, point in enumerate(course.report.points) if point.score == score]
    seconds = course.seconds[same[-1:]] if same else course.seconds[-1:]
    return seconds, np.array([ppl(score.target if at == "target" else score.window)])


def _best_name(course: Course) -> str:
    return f"best so far, of those on {course.read} documents"


def _top(courses: Sequence[Course], at: str, known: Sequence[Level]) -> float:
    """The largest perplexity that is drawn. The result of one run always is."""
    results = [float(_result(course, at)[1][0]) for course in courses]
    drawn = [float(value) for course in courses for value in _values(course, at)[course.finite]]
    low = max(min([*drawn, *results]), min((level.ppl for level in known), default=0.0))
    return max(_CEILING * low, results[0]) if len(courses) == 1 else _CEILING * low


def _values(course: Course, at: str) -> np.ndarray:
    return course.target if at == "target" else course.window


def _below(values: np.ndarray, top: float) -> np.ndarray:
    return np.where(values <= top, values, np.nan)


def _mark(axes: "Axes", level: Level, top: float) -> Any:
    """A horizontal line; for what lies above the axis an entry in the legend alone."""
    from matplotlib.lines import Line2D

    if level.ppl > top:
        return Line2D([], [], linestyle="none", label=f"{level.words}, above")
    look: dict[str, Any] = {"color": style.GREY, "linewidth": 1.1, "linestyle": (0, _DASHES[level.kind])}
    return axes.axhline(level.ppl, label=level.words, zorder=1, **look)


def _mark_above(axes: "Axes", x: np.ndarray, values: np.ndarray, top: float) -> None:
    """At the upper edge, what lies above it."""
    over = values > top
    if over.any():
        look: dict[str, Any] = {
            "marker": "^",
            "markersize": 5,
            "linestyle": "none",
            "color": style.GREY,
            "clip_on": False,
        }
        axes.plot(x[over], np.ones(over.sum()), transform=axes.get_xaxis_transform(), label="_above", **look)


def _value_axis(axes: "Axes", drawn: Sequence[np.ndarray], known: Sequence[Level], top: float) -> None:
    values = [float(one) for some in drawn for one in some if one <= top]
    style.value_axis(axes, "y", values + [level.ppl for level in known if level.ppl <= top] or [1.0], most=7)


def _above(courses: Sequence[Course], at: str, top: float, where: str) -> list[str]:
    """A note of what lies above the axis, or none. where: what became of it, of one run."""
    if len(courses) > 1:
        high = any((np.append(*(some(course, at)[1] for some in (_way, _result))) > top).any() for course in courses)
        return [f"perplexities above {shown(top)} at the {at} are left out"] if high else []
    (course,) = courses
    count = int((_values(course, at)[course.finite] > top).sum())
    which = "1 measurement has" if count == 1 else f"{count:,} measurements have"
    return [f"{which} a perplexity above {shown(top)} at the {at}: {where}"] if count else []


def _notes(courses: Sequence[Course]) -> list[str]:
    reports = [course.report for course in courses]
    notes = list(dict.fromkeys(objective_note(report) for report in reports))
    if len(notes) > 1:
        notes = ["each run's best by its own weights of target and window"]
    notes += [note for course in courses for note in course.overflowed()]
    if len(courses) > 1 and not comparable(reports):
        notes.append("different checkpoints, data or lengths: these perplexities are not of the same tokens")
    notes += [note for course in courses for note in _document_notes(course, len(courses) > 1)]
    return [*dict.fromkeys(notes)]


def _document_notes(course: Course, among_others: bool) -> list[str]:
    """Which perplexities are of other text than the result's."""
    if not course.whole and course.read:
        alone = "here the result alone" if among_others else "its measurements are of other text than the levels"
        what = f"{clean(course.report.level, 20)} reads {course.read} documents until its end"
        return [f"{what}, the result is of {course.report.score.documents}: {alone}"]
    if among_others or all(group.whole for group in course.groups()):
        return []
    return ["on fewer documents (hollow): of other text, and not to be held against the rest"]


def _title(reports: Sequence[TuneReport]) -> str:
    if len(reports) > 1:
        return f"{len(reports)} tuning runs, the best so far and (marker) the result: {subject(reports)}"
    (name,) = names_of(reports)
    return f"Tuning, {name}: {subject(reports)}"


def _length(reports: Sequence[TuneReport], at: str) -> str:
    lengths = {
        report.target_length if at == "target" else report.original_max_position_embeddings for report in reports
    }
    return f"{lengths.pop()} tokens" if len(lengths) == 1 else f"the {at}"


def _unit(courses: Sequence[Course]) -> tuple[float, str]:
    """(its seconds, its name), as large as suits the longest run."""
    longest = _longest(courses)
    return next((size, name) for least, size, name in _UNITS if longest >= least)


def _longest(courses: Sequence[Course]) -> float:
    """Seconds, above 0."""
    return max(float(course.seconds.max(initial=0)) for course in courses) or 1.0
