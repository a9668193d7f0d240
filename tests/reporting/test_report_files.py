"""Reports round-trip through JSON; invalid files are refused with the file name and what was expected."""

import json
import math
from dataclasses import replace

import pytest

from ropecli.errors import DataError
from ropecli.reporting.report_files import read_reports
from ropecli.tuning.tune_report import Score


def test_reports_come_back_as_they_were(report, with_baseline, retrieval, tuning, written):
    one, found = report(18.0, 25.0, 47.0), retrieval({(256, 0.0): 4})
    ranked = replace(found, cells=[replace(found.cells[0], found=(True,) * 4, rank=1.5, margin=-0.5)])
    runs = [tuning(level) for level in ("grid", "heads", "lora", "search")] + [tuning("heads", phases=False)]
    files = [written([one, with_baseline], "several.json"), written(ranked), written(runs, "runs.json")]
    assert read_reports(files) == [one, with_baseline, ranked, *runs]


def test_what_the_tuning_writes_is_read_with_what_overflowed(tuning, tmp_path):
    from ropecli.evaluation.eval_report import write_report
    from ropecli.tuning.tune_report import files_of

    run = tuning("heads")
    lost = Score(math.inf, math.inf, math.inf, 0)
    run = replace(run, base=lost, points=[run.points[0], replace(run.points[1], score=lost), *run.points[2:]])
    for name, value in files_of(run).items():
        write_report(tmp_path / name, value)
        assert read_reports([tmp_path / name]) == [run]


def first(kind, **changes):
    return lambda one: one[kind][0].update(changes)


def whole(**changes):
    return lambda one: one.update(changes)


OF_EVALUATIONS = {
    "a newer schema": (whole(schema_version=99), "schema_version 99, but this release reads 2; update"),
    "an unknown kind": (whole(kind="speed"), "its kind is 'speed'"),
    "a missing field": (lambda one: one.pop("fingerprint"), "fingerprint: Field required"),
    "no environment": (lambda one: one.pop("environment"), "has no 'environment'"),
    "a word for a number": (first("rows", ppl="low"), "rows.0.ppl: "),
    "lengths in disorder": (lambda one: one["rows"].reverse(), "not in ascending order"),
    "an unknown protocol": (whole(protocol="mine"), "protocol: 'mine'"),
    "a baseline of another protocol": (
        lambda one: one.update(baseline={**one, "protocol": "tail"}),
        "differs from the base",
    ),
    "many faults": (whole(rows=[{}] * 99), "; and "),
}
OF_RETRIEVAL = {
    "a depth beyond the end": (first("cells", depth=1.5), "cells.0.depth: "),
    "more hits than trials": (first("cells", hits=5), "more hits than trials"),
}
OF_TUNINGS = {
    "a newer schema": (whole(schema_version=2), "schema_version 2, but this release reads 1; update"),
    "a result that overflowed": (lambda one: one["score"].update(target=None), "the result overflowed"),
    "frequencies of other pairs": (lambda one: one["inv_freq"].pop(), "differs from pretrained_inv_freq"),
}
CASES = [
    *(pytest.param("perplexity", *case, id=name) for name, case in OF_EVALUATIONS.items()),
    *(pytest.param("retrieval", *case, id=name) for name, case in OF_RETRIEVAL.items()),
    *(pytest.param("tune", *case, id=name) for name, case in OF_TUNINGS.items()),
]


@pytest.mark.parametrize(("kind", "change", "expected"), CASES)
def test_a_damaged_report_is_refused(report, retrieval, tuning, written, kind, change, expected):
    whole = {
        "perplexity": lambda: report(18.0, 25.0, 47.0),
        "retrieval": lambda: retrieval({(256, 0.0): 4}),
        "tune": lambda: tuning("heads"),
    }
    path = written(whole[kind]())
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(DataError) as caught:
        read_reports([path])
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1200


TEXTS = {
    "nothing": b"",
    "an object": b"{}",
    "deep lists": b"[" * 100_000,
    "no text": b"\x80\x81",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_no_report_is_refused(tmp_path, text):
    (tmp_path / "report.json").write_bytes(text)
    with pytest.raises(DataError, match=r"report\.json is not a (JSON )?report"):
        read_reports([tmp_path / "report.json"])
