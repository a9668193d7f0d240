"""Bad input, one row each: what is prepared, the command, and the part of the one message that matters.

A row's `prepare` writes files below the current folder, which has the checkpoint `source` (a copy of the tiny Llama).
Every command ends with exit status 2, one message, and no traceback.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest


class Refusal(NamedTuple):
    name: str
    command: Sequence[object]
    message: str
    prepare: Callable[[Path], object] = lambda folder: None


def write(name: str, text: str | bytes) -> Callable[[Path], object]:
    """A `prepare` that writes one file."""

    def prepare(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))

    return prepare


RULER: list[Refusal] = []

OUTPUTS: list[Refusal] = []

TRAINING: list[Refusal] = []

OTHERS: list[Refusal] = []


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name) for row in (*RULER, *OUTPUTS, *TRAINING, *OTHERS)] or [None]
)
def test_bad_input_is_refused(row, ropecli, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row.prepare(tmp_path)
    outcome = ropecli(*row.command)
    assert outcome.code == 2, outcome
    assert outcome.err.count("error:") == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert row.message in outcome.err
    assert len(outcome.err) < 1500
