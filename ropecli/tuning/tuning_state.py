"""Saves and restores the progress of a tuning run in OUTPUT.state (ropecli/resume.py).

documents-0.jsonl   what was measured, by document (evaluation/saved_progress.py)
points.jsonl        every point that was tried, with the seconds that it took
learned/            snapshots of the numbers that are learned, and of their optimizer
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropecli.evaluation.saved_progress import EvalProgress
from ropecli.resume import append_record, open_state, read_records
from ropecli.tuning.tune_report import Point, Score


class TriedPoints:
    """Every measurement, in the order of the first time. file: where they are saved; None: in memory alone."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        earlier = (
            [Point(**{**record, "score": Score(**record["score"])}) for record in read_records(file)] if file else []
        )
        self._found = {_key(point): point for point in earlier}

    @property
    def all(self) -> list[Point]:
        return list(self._found.values())

    def add(self, point: Point) -> None:
        """One that an earlier run measured stays as it was: this time it took no seconds. Raises OutputError."""
        key = _key(point)
        if key not in self._found:
            self._found[key] = point
            if self._file:
                append_record(self._file, asdict(point))


@dataclass(frozen=True)
class TuningState:
    """progress: of the evaluator. points: what was tried. learned: snapshots of what is learned; None: not saved."""

    progress: EvalProgress = field(default_factory=EvalProgress)
    points: TriedPoints = field(default_factory=TriedPoints)
    learned: Path | None = None


@contextlib.contextmanager
def saved_tuning_state(output: Path, request: dict[str, Any]) -> Iterator[TuningState]:
    """What an earlier run of the same request left beside `output`, and where this one saves its own.

    Raises RecipeError for another request, OutputError where another run has it or the disk refuses.
    """
    with open_state(output, request) as folder:
        yield TuningState(EvalProgress(folder), TriedPoints(folder / "points.jsonl"), folder / "learned")


def _key(point: Point) -> str:
    """What tells one measurement from another: all but what it gave, and how long it took."""
    values = {**asdict(point), "seconds": None, "score": point.score.documents}
    return json.dumps(values, sort_keys=True, default=list)
