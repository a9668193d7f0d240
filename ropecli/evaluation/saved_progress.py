"""Save and restore the progress of an evaluation: one record per document in OUTPUT.state (see ropecli/resume.py)."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ropecli.evaluation.results import Tally
from ropecli.resume import append_record, open_state, read_records

Tallies = dict[int, Tally]
"""Tally by length."""


class EvalProgress:
    """Tallies by part and document. A part is one of the models or methods that a run measures.

    folder: where they are saved, one file per process; None: only in memory.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._found: dict[tuple[str, int], Tallies] = {}
        self._file = folder / f"documents-{rank}.jsonl" if folder else None
        for path in sorted(folder.glob("documents-*.jsonl")) if folder else []:
            for record in read_records(path):
                tallies = {int(length): Tally(**tally) for length, tally in record["tallies"].items()}
                self._found[record["part"], record["document"]] = tallies

    def of(self, part: str) -> dict[int, Tallies]:
        """Tallies of one part, by document index."""
        return {document: tallies for (name, document), tallies in self._found.items() if name == part}

    def add(self, part: str, document: int, tallies: Tallies) -> None:
        """Add and save a measurement. Losses that are not finite are not saved. Raises OutputError."""
        self._found[part, document] = tallies
        if self._file and all(tally.is_finite() for tally in tallies.values()):
            values = {str(length): asdict(tally) for length, tally in tallies.items()}
            append_record(self._file, {"part": part, "document": document, "tallies": values})


@contextlib.contextmanager
def open_progress(output: Path | None, request: dict[str, Any], rank: int = 0) -> Iterator[EvalProgress]:
    """Open the progress next to `output`, with the measurements of an earlier run of the same request.

    Raises RecipeError for a different request, OutputError if another run uses it or it cannot be written.
    """
    if output is None:
        yield EvalProgress()
        return
    with open_state(output, request, rank) as folder:
        yield EvalProgress(folder, rank)
