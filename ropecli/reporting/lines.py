"""The lines of a table or plot: one per subject, in sets of the same data.

A subject is a checkpoint as it is, or with a method patched in memory. The lines of a set were measured on the same
tokens or prompts in the same way, so their differences are paired. A table or a pair of axes shows one set. All sets
have one reference, the base.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropecli.checkpoint.identity import Identity
from ropecli.evaluation.report import Change, Report
from ropecli.evaluation.verdict import ENOUGH, certain_sign, level
from ropecli.evaluation.wording import change_words, number
from ropecli.reporting.figures import style
from ropecli.table import Bold, clean

BEST_NOTE = Bold("best, or not worse by the paired 95% interval")
DATA_NOTE = "different data: the numbers of different tables and panels are not comparable"
_COMPARED = ("mode", "stride", "targets", "near", "lead_in", "passages_per_pass")
"""Settings of a task that reports of one set share."""


@dataclass(frozen=True, eq=False)
class Line:
    """A model in a set. name: unique there. is_base: the same in every set. look: the style in figures."""

    name: str
    report: Report
    is_base: bool
    look: Mapping[str, Any]

    def at(self, length: int) -> float | None:
        return self.report.value(length) if length in self.report.lengths else None

    def shown(self, length: int, unit: str = "") -> str:
        """The value as text, or a dash."""
        value = self.at(length)
        return "–" if value is None else number(value, self.report.places) + unit

    def change_words(self, change: Change) -> str:
        """In percent, in percentage points, or in the value's own unit."""
        unit = self.report.change_unit
        return change_words(change, unit, places=None if unit else self.report.places)

    def change_from(self, base: "Line | None", length: int) -> Change | None:
        """The paired change from a line of the same set; None if one of them lacks the length."""
        both = base is not None and length in self.report.lengths and length in base.report.lengths
        return self.report.change_from(base.report, length) if base and both else None

    def certainly_worse(self, other: "Line", length: int) -> bool | None:
        """Whether the paired interval says so; None without an interval or a length, and of few samples."""
        change = self.change_from(other, length)
        sign = certain_sign(change, self.report.samples(length)) if change else None
        return None if sign is None else sign == (-1 if self.report.higher else 1)


def sets_of(reports: Iterable[Report]) -> list[list[Line]]:
    """The lines of each set of comparable reports: the base, then by checkpoint in order of appearance.

    The base is the first report's model. Runs on the same text are of the documents that they share. A model that is in
    several files, under two names, or as a folder and as a method in memory, is one line.
    """
    reports = _joined(list(reports))
    sets: list[dict[Identity, Report]] = []
    subjects: dict[Identity, Report] = {}
    for report in reports:
        key = report.identity
        if key not in subjects or subjects[key].in_memory > report.in_memory:  # the checkpoint gives the name
            subjects[key] = report
        members = next((members for members in sets if all(map(report.is_comparable, members.values()))), None)
        if members is None:
            sets.append({key: report})
        else:
            if report.reference:  # one denominator for all
                report = replace(report, reference=next(iter(members.values())).reference)
            members[key] = max(members.get(key, report), report, key=lambda each: len(each.cells))
    shown = _named(subjects, reports[0].identity)
    return [_sorted([Line(report=report, **shown[key]) for key, report in members.items()]) for members in sets]


def _joined(reports: list[Report]) -> list[Report]:
    """Reports of the same measurement on other documents, each of those that they share. Recall has one reference."""
    groups: list[tuple[list[int], list[str]]] = []  # the places of reports, and the documents that they share
    for place, report in enumerate(reports):
        if not report.documents or any(cell.samples != len(report.documents) for cell in report.cells):
            continue
        for places, shared in groups:
            common = [document for document in shared if document in report.documents]
            enough = len(common) >= min(ENOUGH, len(report.documents), len(shared))
            if enough and _are_alike(reports[places[0]], report, common):
                places.append(place)
                shared[:] = common
                break
        else:
            groups.append(([place], list(report.documents)))
    for places, shared in groups:
        first = reports[places[0]]
        if all(reports[place].is_comparable(first) for place in places):
            continue
        numbers = [first.documents.index(document) for document in shared]
        reference = first.reference and first.reference.of_samples(numbers)
        for place in places:
            reports[place] = reports[place].only(shared, reference)
    return reports


def _are_alike(first: Report, second: Report, documents: Sequence[str]) -> bool:
    """Whether two reports score as many tokens of these documents, in one way, at each length that both have."""
    ways = [(report.task, *map(report.settings.get, _COMPARED)) for report in (first, second)]
    sides = [[report.documents.index(document) for document in documents] for report in (first, second)]
    return ways[0] == ways[1] and all(
        [one.weights[place] for place in sides[0]] == [other.weights[place] for place in sides[1]]
        for length in {*first.lengths} & {*second.lengths}
        for one, other in zip(first.cells_at(length), second.cells_at(length), strict=False)
    )


def _named(subjects: Mapping[Identity, Report], base: Identity) -> dict[Identity, dict[str, Any]]:
    """The name of each model, whether it is the base, and its look: the same in every set."""
    patched = {report.checkpoint for report in subjects.values() if report.in_memory and report.method != "none"}
    checkpoints = {report.checkpoint for report in subjects.values()}
    several, folders = len(checkpoints) > 1, [Path(checkpoint).name for checkpoint in checkpoints]

    def name(key: Identity, report: Report) -> str:
        folder, label = Path(report.checkpoint).name, clean(report.label)
        is_path = report.checkpoint.count("/") > 1  # a Hub id has one
        checkpoint = clean(folder if is_path and folders.count(folder) == 1 else report.checkpoint, 40)
        if key == base:
            return f"{checkpoint} (base)" if several else "base"
        if report.method == "none":
            return checkpoint
        if report.in_memory:
            return f"{checkpoint}, {label}" if len(patched) > 1 else label
        return f"{checkpoint} ({label})"

    if len(subjects) == 1 and subjects[base].method != "none":
        base = Identity("", "")  # nothing is compared with it
    names = numbered(name(*item) for item in subjects.items())
    kinds = [report.checkpoint if report.method == "none" else report.method for report in subjects.values()]
    looks = style.looks("" if key == base else kind for key, kind in zip(subjects, kinds, strict=True))
    return {
        key: {"name": name, "is_base": key == base, "look": style.BASE_LOOK if key == base else look}
        for key, name, look in zip(subjects, names, looks, strict=True)
    }


def _sorted(lines: Sequence[Line]) -> list[Line]:
    order = [line.report.checkpoint for line in lines]
    return sorted(lines, key=lambda line: (not line.is_base, order.index(line.report.checkpoint)))


def numbered(names: Iterable[str]) -> list[str]:
    """Append a number to repeated names."""
    names = list(names)
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [name + f" ({count})" * (count > 1) for name, count in zip(names, counts, strict=True)]


def base_of(lines: Sequence[Line]) -> Line | None:
    """The reference of all sets, if the set has others to compare with it."""
    return lines[0] if len(lines) > 1 and lines[0].is_base else None


def lengths_of(lines: Iterable[Line]) -> list[int]:
    return sorted({length for line in lines for length in line.report.lengths})


def ranked(lines: Sequence[Line], length: int) -> list[Line]:
    """The lines with a value at a length, best first."""
    values = {line: value for line in lines if (value := line.at(length)) is not None}
    return sorted(values, key=values.__getitem__, reverse=lines[0].report.higher)


def level_lines(lines: Sequence[Line], length: int) -> list[Line]:
    """The best line, and those that are not certainly worse.

    Empty for a single line, for few samples, and if there is no interval.
    """
    lines = ranked(lines, length)
    if len(lines) < 2 or any(line.certainly_worse(lines[0], length) is None for line in lines[1:]):
        return []
    return level(lines, lambda line, best: line.certainly_worse(best, length))


def title_of(lines: Sequence[Line], what: str) -> str:
    """Checkpoint, `what`, protocol, data and number of documents of one set."""
    report, checkpoints = lines[0].report, {line.report.checkpoint for line in lines}
    checkpoint = f"{len(checkpoints)} checkpoints" if len(checkpoints) > 1 else clean(report.checkpoint, 120)
    if len(lines) == 1 and report.in_memory:
        checkpoint += f", {clean(report.label)} in memory"
    return f"{checkpoint}{what}, {report.measured_by}, data {clean(report.source, 120)}, {report.counted}"
