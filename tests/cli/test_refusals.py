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


SQUAD = (
    '{"data": [{"paragraphs": [{"context": "A text.", "qas": [{"question": "Which?", "answers": [{"text": %s}]}]}]}]}'
)
HOTPOTQA = '[{"question": "Which?", "answer": %s, "context": [["A title", ["A text."]]]}]'
ASK_SQUAD = ["ruler", "source", "--lengths", "512", "--tasks", "qa_1", "--squad", "questions.json"]
ASK_HOTPOTQA = ["ruler", "source", "--lengths", "512", "--tasks", "qa_2", "--hotpotqa", "questions.json"]
ANSWER = "questions.json is not a file of squad questions, data.0.paragraphs.0.qas.0.answers.0.text: Input should be"
RULER: list[Refusal] = [
    *(
        Refusal(
            f"ruler: threshold {value}", ["ruler", "source", "--threshold", value], f"--threshold is {value}; expected"
        )
        for value in ("85.6", "0", "nan")
    ),
    Refusal(
        "ruler: questions without their task",
        ["ruler", "source", "--tasks", "vt", "--squad", "questions.json"],
        "--squad is for qa_1, which is not in --tasks",
    ),
    *(
        Refusal(f"ruler: answer {answer}", ASK_SQUAD, ANSWER, write("questions.json", SQUAD % answer))
        for answer in ("1945", "null", '["a"]')
    ),
    Refusal(
        "ruler: empty answer",
        ASK_SQUAD,
        "questions.json: the question 'Which?' has an empty answer",
        write("questions.json", SQUAD % '""'),
    ),
    Refusal(
        "ruler: lone surrogate",
        ASK_SQUAD,
        "questions.json is not a file of squad questions, file: Invalid JSON",
        write("questions.json", SQUAD % r'"\ud800"'),
    ),
    Refusal(
        "ruler: deep nesting",
        ASK_SQUAD,
        "questions.json is not a file of squad questions, file: Invalid JSON: recursion limit",
        write("questions.json", "[" * 100_000),
    ),
    Refusal(
        "ruler: context that is a number",
        ASK_SQUAD,
        "data.0.paragraphs.0.context: Input should be a valid string",
        write("questions.json", (SQUAD % '"a"').replace('"A text."', "5")),
    ),
    Refusal(
        "ruler: hotpotqa answer that is a number",
        ASK_HOTPOTQA,
        "questions.json is not a file of hotpotqa questions, 0.answer: Input should be a valid string",
        write("questions.json", HOTPOTQA % 5),
    ),
]

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
