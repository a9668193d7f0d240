"""What a tuning run measured, in its order and by what it cost; how its states and several runs are called."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ropecli.report.lines import numbered
from ropecli.report.wording import clean, number
from ropecli.tune.record import TRAINING, Point, Score, TuneReport

_MOST_GROUPS = 12
"""Of points that look alike; more would have no marker of their own."""


@dataclass(frozen=True)
class Level:
    """A state of the model that the points are held against. ppl: perplexity; infinite where the model overflowed.

    kind: the same for the same state in another panel.
    """

    kind: str
    name: str
    ppl: float

    @property
    def words(self) -> str:
        return f"{self.name}: {shown(self.ppl)}"


@dataclass(frozen=True)
class Group:
    """Points of one level, read on as many documents; indices into the course. whole: on those of the result."""

    name: str
    indices: np.ndarray
    training: bool
    whole: bool


class Course:
    """A report's points. seconds: since the beginning, when each was known. target, window: perplexities, infinite
    where the model overflowed. All of shape (points,), float64.
    """

    def __init__(self, report: TuneReport) -> None:
        self.report = report
        points = report.points
        self.seconds = np.cumsum([point.seconds for point in points])
        self.target = np.array([ppl(point.score.target) for point in points])
        self.window = np.array([ppl(point.score.window) for point in points])
        self.objective = np.array([point.score.objective for point in points])
        self.documents = np.array([point.score.documents for point in points])
        self.finite = np.isfinite(self.target) & np.isfinite(self.window) & np.isfinite(self.objective)

    @property
    def whole(self) -> bool:
        """Whether the best is among points on the documents of the result; a search reads fewer until its end."""
        decided = self.finite & (self.documents == self.report.score.documents)
        return bool(decided.any()) and (self.report.level != "search" or self._usual == self.report.score.documents)

    @property
    def read(self) -> int:
        """The documents of the points among which there is a best: the result's, or else what most points read."""
        return self.report.score.documents if self.whole else self._usual

    @property
    def _usual(self) -> int:
        documents, points = np.unique(self.documents[self.finite], return_counts=True)
        return int(documents[points == points.max()][-1]) if len(documents) else 0

    def best_so_far(self) -> np.ndarray:
        """Indices of the points, of those on as many documents as `read`, that had the lowest objective until then."""
        kept: list[int] = []
        for index in np.flatnonzero(self.finite & (self.documents == self.read)):
            if not kept or self.objective[index] < self.objective[kept[-1]]:
                kept.append(int(index))
        return np.array(kept, dtype=int)

    def groups(self) -> list[Group]:
        """The points that did not overflow, in the order they began."""
        points = self.report.points
        keys = [(point.level, point.score.documents) for point in points]
        if len(set(keys)) > _MOST_GROUPS:
            keys = [(point.level, 0) for point in points]
        found: dict[tuple[str, int], list[int]] = {}
        for index in np.flatnonzero(self.finite):
            found.setdefault(keys[index], []).append(int(index))
        return [
            Group(
                _group_name(level, documents, [points[index] for index in indices]),
                np.array(indices),
                level in TRAINING,
                documents in (0, self.report.score.documents),
            )
            for (level, documents), indices in found.items()
        ]

    def overflowed(self) -> list[str]:
        """A note of the points that are left out, or none."""
        count = int((~self.finite).sum())
        return [f"{_counted(count, 'measurement')} left out: the model overflowed there"] if count else []


def ppl(nll: float) -> float:
    """nll: nats; infinite where the model overflowed."""
    return math.exp(nll) if math.isfinite(nll) else math.inf


def shown(value: float) -> str:
    return number(value) if math.isfinite(value) else "overflowed"


def levels(report: TuneReport, at: str) -> list[Level]:
    """at: target or window. The pretrained model at its window stands in both: what an extension is held against."""
    trained = report.level in TRAINING
    known = [
        ("base", f"as pretrained, at {report.original_max_position_embeddings} tokens", ppl(report.base.window)),
        ("base at target", f"as pretrained, at {report.target_length} tokens", ppl(report.base.target)),
        ("plain", clean(report.plain_name, 60), _at(report.plain, at)),
        ("begun", "best constants", _at(report.begun, at)),
        ("result", f"result, after {_counted(report.step, 'step')}" if trained else "result", _at(report.score, at)),
    ]
    longer = at == "target" and report.target_length != report.original_max_position_embeddings
    left_out = {kind for kind, out in (("begun", not trained), ("base at target", not longer)) if out}
    return [Level(*one) for one in known if one[0] not in left_out]


def _at(score: Score, at: str) -> float:
    return ppl(score.target if at == "target" else score.window)


def names_of(reports: Sequence[TuneReport]) -> list[str]:
    """Level, method and factor, how many numbers were learned, and the checkpoint where there are several."""
    several = len({report.digest for report in reports}) > 1
    names = []
    for report in reports:
        before = f"{clean(report.checkpoint, 40)}, " if several else ""
        learned = f", {_counted(report.learned, 'number')} learned" if report.learned else ""
        names.append(clean(f"{before}{clean(report.level, 20)}, {method_of(report)}{learned}", 120))
    return numbered(names)


def method_of(report: TuneReport) -> str:
    return f"{clean(report.method, 30)} ×{report.factor:g}"


def subject(reports: Sequence[TuneReport]) -> str:
    """Which checkpoint, on which data; where these are several, how many."""
    checkpoints = list(dict.fromkeys(clean(report.checkpoint) for report in reports))
    sources = list(dict.fromkeys(clean(report.source) for report in reports))
    one = checkpoints[0] if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints"
    return f"{one}, calibration data {sources[0] if len(sources) == 1 else f'of {len(sources)} sources'}"


def comparable(reports: Sequence[TuneReport]) -> bool:
    """Whether all were scored on the same tokens by the same lengths, so that one perplexity means one thing."""
    return len({_measure_of(report) for report in reports}) == 1


def _measure_of(report: TuneReport) -> tuple[object, ...]:
    return (
        report.digest,
        report.fingerprint,
        report.target_length,
        report.original_max_position_embeddings,
        report.score.documents,
    )


def objective_note(report: TuneReport) -> str:
    """By what the best is the best."""
    weight = report.settings.get("short_weight")
    known = isinstance(weight, int | float) and not isinstance(weight, bool)
    share = f"{weight:g} × " if known else "a share of "
    return f"the best: by the loss at {report.target_length} tokens + {share}that at the window"


def _group_name(level: str, documents: int, points: Sequence[Point]) -> str:
    steps = [point.step for point in points]
    span = f"{min(steps)} to {max(steps)}" if max(steps) > min(steps) else f"{steps[0]}"
    what = {"heads": f", step {span}", "lora": f", step {span}", "search": f", iteration {span}"}.get(level, "")
    read = f", {_counted(documents, 'document')}" if documents else ""
    return f"{clean(level, 20)}{read}{what}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"
