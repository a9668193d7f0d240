"""Reports round-trip through JSON; invalid files are refused with the file name and what was expected."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ropecli.errors import DataError
from ropecli.reporting.report_files import read_reports
from ropecli.tuning.task import Score


def test_reports_come_back_as_they_were(report, with_baseline, retrieval, tuning, written):
    one, found = report(18.0, 25.0, 47.0), retrieval({(256, 0.0): 4})
    ranked = replace(found, cells=[replace(found.cells[0], rank=1.5, margin=-0.5)])
    runs = [tuning(level) for level in ("grid", "heads", "lora", "search")] + [tuning("heads", phases=False)]
    files = [written([one, with_baseline], "several.json"), written(ranked), written(runs, "runs.json")]
    assert read_reports(files) == [one, with_baseline, ranked, *runs]


def test_what_the_tuning_writes_is_read_with_what_overflowed(tuning, tmp_path):
    from ropecli.evaluation.report import write_report

    run = tuning("heads")
    lost = Score(math.inf, math.inf, math.inf, 0)
    run = replace(run, base=lost, points=[run.points[0], replace(run.points[1], score=lost), *run.points[2:]])
    for name, value in run.files().items():
        write_report(tmp_path / name, value)
        assert read_reports([tmp_path / name]) == [run]


def test_keys_of_an_earlier_release_are_read_and_written_beside_the_new_ones(tuning):
    path = Path(__file__).parents[1] / "compatibility" / "tuned-heads" / "tune.json"
    earlier, (report,) = json.loads(path.read_text()), read_reports([path])
    assert report.untuned.pretraining == earlier["plain"]["window"]
    assert report.start.objective == earlier["begun"]["objective"]
    assert report.untuned_name == earlier["plain_name"]
    written = tuning("grid").as_json()
    assert (written["plain"], written["begun"]) == (written["untuned"], written["start"])
    assert all(point["score"]["window"] == point["score"]["pretraining"] for point in written["points"])


def first(kind, **changes):
    return lambda one: one[kind][0].update(changes)


def whole(**changes):
    return lambda one: one.update(changes)


OF_EVALUATIONS = {
    "a newer schema": (whole(schema_version=99), "schema_version 99, but this release reads 2 and 3; update"),
    "an unknown kind": (whole(kind="speed"), "its kind is 'speed'"),
    "a missing field": (lambda one: one.pop("fingerprint"), "fingerprint: Field required"),
    "no environment": (lambda one: one.pop("environment"), "has no 'environment'"),
    "a word for a number": (first("cells", tokens="many"), "cells.0.tokens: "),
    "lengths in disorder": (lambda one: one["cells"].reverse(), "not in ascending order"),
    "an unknown protocol": (whole(task="mine"), "task: 'mine' is not a protocol"),
    "a baseline of another protocol": (
        lambda one: one.update(baseline={**one, "task": "tail"}),
        "baseline: its protocol, 'tail', differs",
    ),
    "a baseline with an error": (
        lambda one: one.update(baseline={**one, "cells": [{**one["cells"][0], "weights": [1.0]}]}),
        "baseline.cells.0: sums and weights have different lengths",
    ),
    "no tokens": (first("cells", weights=[0.0] * 4), "the weights are all 0"),
    "a loss that overflows": (first("cells", sums=[1e9] * 4), "the loss overflowed"),
    "an infinite loss": (first("cells", sums=["inf"] * 4), "the loss overflowed"),
    "an interval that overflows": (first("cells", high=0.0), "an end of the interval is not a perplexity"),
    "many faults": (whole(cells=[{}] * 99), "; and "),
}
OF_RETRIEVAL = {
    "a depth beyond the end": (first("cells", depth=1.5), "cells.0.depth: "),
    "a score above 1": (first("cells", sums=[1.5] * 4), "a score is not from 0 to 1"),
    "a cell twice": (lambda one: one["cells"].append(one["cells"][0]), "a task appears twice"),
    "a threshold in words": (whole(settings={"threshold": "high"}), "settings.threshold: not a number"),
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


SCHEMA_2 = Path(__file__).parents[1] / "compatibility" / "reports"
OF_SCHEMA_2 = {
    "no rows": ("tail", lambda one: one.pop("rows"), "KeyError: 'rows'"),
    "rows of words": ("tail", whole(rows=["ppl"]), "AttributeError"),
    "a baseline in words": ("tail", lambda one: one["baseline"].update(rows=[[]]), "AttributeError"),
    "no losses": ("tail", lambda one: one["rows"][0].pop("document_nll"), "cells.0.sums: Field required"),
    "more hits than trials": ("passkey", first("cells", hits=5, found=[]), "5 hits of 2 trials"),
    "too many trials": ("passkey", first("cells", trials=10**12, found=[]), "hits of 1000000000000 trials"),
    "scores in words": ("ruler-generate", first("cells", scores="high"), "TypeError"),
    "no scores": ("ruler-generate", first("cells", scores=[]), "ZeroDivisionError"),
}


@pytest.mark.parametrize(("name", "change", "expected"), OF_SCHEMA_2.values(), ids=OF_SCHEMA_2)
def test_a_damaged_report_of_schema_2_is_refused(tmp_path, name, change, expected):
    value = json.loads((SCHEMA_2 / f"{name}.json").read_text())
    value = value[0] if isinstance(value, list) else value
    change(value)
    (tmp_path / "report.json").write_text(json.dumps(value))
    with pytest.raises(DataError, match=r"report\.json is invalid") as caught:
        read_reports([tmp_path / "report.json"])
    assert expected in str(caught.value)


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
