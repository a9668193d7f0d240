"""Saves and restores the progress of an evaluation, next to its report: a line for each document (checked_lines.py).

OUTPUT.progress-0      of the first process; its first line holds the request, each other line a document's result
OUTPUT.progress-1 …    of the other processes

A run is resumed only with the same request.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ropecli.atomic import sole_use
from ropecli.errors import OutputError, RecipeError, shown
from ropecli.evaluation.checked_lines import appending, read_lines
from ropecli.evaluation.results import Tally

Tallies = dict[int, Tally]
"""By length."""


class EvalProgress:
    """What was measured, by part and document; a part is one of the models or methods that a run measures.

    append: keeps a line in a file; without it all is kept in memory alone.
    """

    def __init__(self, append: Callable[[Any], None] = lambda line: None) -> None:
        self._append = append
        self._found: dict[tuple[str, int], Tallies] = {}

    @property
    def empty(self) -> bool:
        """Whether it holds nothing that a run could go on from; a loss that is not finite is measured again."""
        return not any(all(tally.is_finite() for tally in tallies.values()) for tallies in self._found.values())

    def of(self, part: str) -> dict[int, Tallies]:
        """By the document's index."""
        return {document: tallies for (name, document), tallies in self._found.items() if name == part}

    def add(self, part: str, document: int, tallies: Tallies) -> None:
        """Raises OutputError for what the disk refuses."""
        self._found[part, document] = tallies
        values = {str(length): asdict(tally) for length, tally in tallies.items()}
        self._append({"part": part, "document": document, "tallies": values})

    def take(self, line: dict[str, Any]) -> None:
        """Takes in a line of a file. A loss that is not finite is measured again."""
        tallies = {int(length): Tally(**tally) for length, tally in line["tallies"].items()}
        if all(tally.is_finite() for tally in tallies.values()):
            self._found[line["part"], line["document"]] = tallies


@contextlib.contextmanager
def open_progress(output: Path | None, asked: dict[str, Any], rank: int = 0) -> Iterator[EvalProgress]:
    """The progress beside `output`, with what an earlier run of the same request left there.

    Removed at the end where nothing was measured. Raises RecipeError for another request, OutputError where another
    run has it or the disk refuses.
    """
    if output is None:
        yield EvalProgress()
        return
    asked = json.loads(json.dumps(asked))
    own = output.with_name(f"{output.name}.progress-{rank}")
    with sole_use(_lock_file(own), own):
        lines = [line for path in _files(output) for line in _read(path, asked)]
        with appending(own, asked) as append:
            progress = EvalProgress(append)
            for line in lines:
                progress.take(line)
            try:
                yield progress
            finally:
                if progress.empty:
                    own.unlink(missing_ok=True)


def has_progress(output: Path | None) -> bool:
    return output is not None and bool(_files(output))


def refuse_interrupted(output: Path | None, resume: bool) -> None:
    """Raises OutputError where `output` has progress that is not to be gone on with, and for --resume without it."""
    if output is None:
        if resume:
            raise OutputError("--resume goes on with the run of an --output; name it.")
        return
    if (files := _files(output)) and not resume:
        raise OutputError(
            f"{files[0]} is of a run that was interrupted, or is still going on. Go on with it by --resume, or remove "
            "it to begin anew."
        )


def remove_progress(output: Path | None) -> None:
    """When the report is written, its progress is no more needed."""
    for path in _files(output) if output else []:
        path.unlink(missing_ok=True)
        _lock_file(path).unlink(missing_ok=True)


def _files(output: Path) -> list[Path]:
    ours = re.compile(re.escape(output.name) + r"\.progress-\d+")
    try:
        return sorted(path for path in output.parent.iterdir() if ours.fullmatch(path.name))
    except OSError:
        return []


def _read(path: Path, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Its lines but for the request. Raises RecipeError where that is another than `asked`, OutputError for no such."""
    before, *lines = read_lines(path) or [asked]
    if changed := [key for key in asked if before.get(key) != asked[key]]:
        shown_changes = [f"  {key}: {shown(before.get(key))} then, {shown(asked[key])} now" for key in changed]
        raise RecipeError(
            f"{path} is of another request; go on with the same, or remove it:\n" + "\n".join(shown_changes)
        )
    return lines


def _lock_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")
