"""Saves and restores the progress of a tuning run, beside its output; only the same request can resume it.

OUTPUT.progress-0           what was measured, by document (evaluation/saved_progress.py); its lock is the run's
OUTPUT.state/points.jsonl   every point that was tried, with the seconds that it took then
OUTPUT.state/training.pt    the numbers that are learned, and their optimizer
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropecli.atomic import is_partial
from ropecli.errors import OutputError, RecipeError
from ropecli.evaluation.checked_lines import appending, read_lines
from ropecli.evaluation.saved_progress import EvalProgress, open_progress, refuse_interrupted, remove_progress
from ropecli.tuning.tune_report import Point, Score

_POINTS = "points.jsonl"
_TRAINING = "training.pt"
_REQUEST = "request"


class TriedPoints:
    """Every measurement, in the order of the first time.

    append: keeps a line in a file; without it all is kept in memory alone.
    """

    def __init__(self, append: Callable[[Any], None] = lambda line: None, earlier: tuple[Point, ...] = ()) -> None:
        self._append = append
        self._found = {_key(point): point for point in earlier}

    @property
    def all(self) -> list[Point]:
        return list(self._found.values())

    def add(self, point: Point) -> None:
        """One that an earlier run had measured stays as it was: this time it took none. Raises OutputError for what the
        disk refuses.
        """
        key = _key(point)
        if key not in self._found:
            self._found[key] = point
            self._append(asdict(point))


@dataclass(frozen=True)
class TuningState:
    """progress: of the evaluator. points: what was tried. learning_file: for what is learned; None: not saved."""

    progress: EvalProgress = field(default_factory=EvalProgress)
    points: TriedPoints = field(default_factory=TriedPoints)
    learning_file: Path | None = None


@contextlib.contextmanager
def saved_tuning_state(output: Path, request: dict[str, Any]) -> Iterator[TuningState]:
    """What an earlier run of the same request left beside `output`, and where this one leaves its own.

    Nothing is left where nothing was measured. Raises RecipeError for another request, OutputError where another run
    has it or the disk refuses.
    """
    folder = _folder(output)
    with open_progress(output, request) as progress:
        found = folder.exists()
        try:
            header = {_REQUEST: hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()}
            earlier = _read(folder, header)
            with appending(folder / _POINTS, header) as append:
                yield TuningState(progress, TriedPoints(append, earlier), folder / _TRAINING)
        finally:
            if progress.empty and not found:  # else it may be another request's
                _remove(folder)


def refuse_saved_state(output: Path, resume: bool) -> None:
    """Raises OutputError where a run was interrupted and is not to be resumed, and for a user's file in its place."""
    refuse_interrupted(output, resume)
    folder = _folder(output)
    if folder.exists() and not (folder.is_dir() and all(_is_own(path) for path in folder.iterdir())):
        raise OutputError(
            f"{folder} is in the way: it is not the state of a tuning run. Rename it, or give another --output."
        )
    if folder.exists() and not resume:
        raise OutputError(
            f"{folder} is left of a run that was interrupted. Go on with it by --resume, or remove it to begin anew."
        )


def remove_saved_state(output: Path) -> None:
    """When the checkpoint is written."""
    _remove(_folder(output))
    remove_progress(output)


def _folder(output: Path) -> Path:
    return output.with_name(f"{output.name}.state")


def _is_own(path: Path) -> bool:
    return any(path.name == name or is_partial(path, path.with_name(name)) for name in (_POINTS, _TRAINING))


def _remove(folder: Path) -> None:
    """Removes a state's own files, and its folder where nothing else is in it."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _is_own(path):
                path.unlink()
        folder.rmdir()


def _key(point: Point) -> str:
    """What tells one measurement from another: all but what it gave, and how long it took."""
    values = {**asdict(point), "seconds": None, "score": point.score.documents}
    return json.dumps(values, sort_keys=True, default=list)


def _read(folder: Path, header: dict[str, Any]) -> tuple[Point, ...]:
    """Raises RecipeError for what is left of another request."""
    first, *lines = read_lines(folder / _POINTS, delete=folder) or [None]
    if first != header and (first or (folder / _TRAINING).exists()):
        raise RecipeError(
            f"{folder} is of another request; go on with the same, or remove it and {folder.stem}.progress-0."
        )
    return tuple(Point(**{**line, "score": Score(**line["score"])}) for line in lines)
