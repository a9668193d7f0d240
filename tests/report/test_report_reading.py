"""Reports come back from JSON as they were; what is no report is refused, with the file and what was expected."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from ropecli.errors import DataError
from ropecli.report.reading import read_reports
from ropecli.tune.record import Score


def test_reports_come_back_as_they_were(report, with_baseline, retrieval, written):
    one, found = report(18.0, 25.0, 47.0), retrieval({(256, 0.0): 4})
    assert read_reports([written(one)]) == [one]
    files = [written([one, with_baseline], "several.json"), written(found, "found.json")]
    assert read_reports(files) == [one, with_baseline, found]


def test_reading_loads_no_model_library(with_baseline, written):
    code = """
import sys
from pathlib import Path
from ropecli.report.reading import read_reports
read_reports([Path(sys.argv[1])])
assert not {"torch", "transformers", "matplotlib"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, written(with_baseline)], check=True)


@pytest.fixture
def spoiled(report, written):
    """spoiled(change) -> the JSON file of a report after change(its dictionary)."""

    def spoil(change):
        path = written(report(18.0, 25.0, 47.0))
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
        return path

    return spoil


CHANGES = {
    "a newer schema": (lambda one: one.update(schema_version=99), "schema_version 99; this release reads 2: update"),
    "an older schema": (lambda one: one.update(schema_version=1), "measure again"),
    "an earlier release's": (
        lambda one: (one.update(schema_version=1), one.pop("kind")),
        "schema_version 1; this release reads 2: measure again with this release",
    ),
    "no schema": (lambda one: one.pop("schema_version"), "should have schema_version 2, and has none"),
    "a perplexity of another loss": (lambda one: one["rows"][0].update(nll=1.0), "ppl must be exp(nll)"),
    "a schema that is no number": (lambda one: one.update(schema_version=True), "schema_version True"),
    "an unknown kind": (lambda one: one.update(kind="speed"), "its 'kind' is 'speed'; 'perplexity', 'retrieval' or"),
    "a kind that is no word": (lambda one: one.update(kind=["perplexity"]), "'kind'"),
    "no rows": (lambda one: one.update(rows=[]), "0 rows"),
    "rows that are no list": (lambda one: one.update(rows=3), "rows: "),
    "a missing field": (lambda one: one.pop("fingerprint"), "fingerprint: "),
    "no environment": (lambda one: one.pop("environment"), "environment"),
    "a number in words": (lambda one: one["rows"][0].update(ppl="18"), "rows.0.ppl: "),
    "null": (lambda one: one["rows"][0].update(ppl=None), "rows.0.ppl: "),
    "half an interval": (lambda one: one["rows"][0].update(ppl_low=None), "interval"),
    "an interval upside down": (lambda one: one["rows"][0].update(ppl_low=99.0), "interval"),
    "perplexity below zero": (lambda one: one["rows"][0].update(ppl=-1.0), "perplexity must be at least 1"),
    "a length of zero": (lambda one: one["rows"][0].update(length=0), "no number of tokens"),
    "a huge length": (lambda one: one["rows"][2].update(length=10**20), "no number of tokens"),
    "lengths in disorder": (lambda one: one["rows"].reverse(), "ascending"),
    "too few documents": (lambda one: one["rows"][1].update(document_nll=[1.0]), "document_nll"),
    "buckets in disorder": (lambda one: one["rows"][0]["by_context"].reverse(), "by_context"),
    "an unknown protocol": (lambda one: one.update(protocol="mine"), "protocol 'mine'"),
    "a factor of zero": (lambda one: one.update(factor=0.0), "factor"),
    "a window of zero": (lambda one: one.update(original_max_position_embeddings=0), "original_max_position"),
    "a baseline that is a list": (lambda one: one.update(baseline=[]), "baseline: "),
    "a baseline of a baseline": (lambda one: one.update(baseline={**one, "baseline": dict(one)}), "of its own"),
    "a baseline of another protocol": (
        lambda one: one.update(baseline={**one, "protocol": "tail"}),
        "another protocol",
    ),
    "half a headline": (lambda one: one.update(headlines=[{"name": "gain"}]), "headlines.0"),
    "half a surrogate": (lambda one: one.update(checkpoint="\ud800"), "JSON"),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_damaged_report_is_refused(spoiled, change, expected):
    path = spoiled(change)
    with pytest.raises(DataError) as caught:
        read_reports([path])
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


TEXTS = {
    "nothing": ("", "not JSON"),
    "no JSON": ("{", "not JSON"),
    "a page": ("<html>", "not JSON"),
    "a number": ("3", "no report"),
    "an empty list": ("[]", "empty list"),
    "a list of lists": ("[[]]", "report 1 is no report"),
    "an object": ("{}", "no report"),
    "deep lists": ("[" * 100_000, "nested too deeply"),
    "deep objects": ('{"kind": ' * 100_000, "nested too deeply"),
    "NaN": ('{"kind": NaN}', "NaN"),
    "infinity": ('{"kind": -Infinity}', "-Infinity"),
    "a number without end": ('{"kind": 1e999}', "1e999"),
    "an integer without end": ('{"kind": ' + "9" * 5000 + "}", "beyond all use"),
}


@pytest.mark.parametrize(("text", "expected"), TEXTS.values(), ids=TEXTS)
def test_what_is_no_report_is_refused(tmp_path, text, expected):
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_reports([tmp_path / "report.json"])
    assert expected in str(caught.value)
    assert "report.json" in str(caught.value)


def test_what_is_no_file_of_text_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\x80\x81")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**30)
    for path, expected in (
        (tmp_path, "is no file"),
        (tmp_path / "missing", "No such file"),
        (tmp_path / "binary", "not UTF-8"),
        (tmp_path / "huge", "at most"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(DataError, match=expected):
            read_reports([path])
    with pytest.raises(DataError, match="No report"):
        read_reports([])


@pytest.mark.parametrize(
    ("field", "value"),
    [("hits", 5), ("hits", -1), ("trials", 0), ("depth", 1.5), ("length", 0), ("rank", "first"), ("rank", 0.5)]
    + [("found", found) for found in ([True], [True] * 3 + [False], [True] * 5)],
)
def test_a_cell_that_cannot_be_is_refused(retrieval, written, field, value):
    path = written(retrieval({(256, 0.0): 4}))
    report = json.loads(path.read_text())
    report["cells"][0][field] = value
    path.write_text(json.dumps(report))
    with pytest.raises(DataError, match="cell"):
        read_reports([path])


def test_hits_trial_by_trial_are_read_where_they_agree(retrieval, written):
    found = retrieval({(256, 0.0): 3})
    whole = replace(found, cells=[replace(found.cells[0], found=(True, False, True, True), rank=1.0)])
    assert read_reports([written(whole)]) == [whole]
    with pytest.raises(DataError, match="mode 'guess'"):
        read_reports([written(replace(found, mode="guess"))])


def test_retrieval_of_no_cells_or_of_one_twice_is_refused(retrieval, written):
    found = retrieval({(256, 0.0): 4})
    for cells, expected in (([], "0 cells"), (found.cells * 2, "the same length and depth")):
        with pytest.raises(DataError, match=expected):
            read_reports([written(replace(found, cells=cells))])


def test_a_tuning_comes_back_as_it_was(tuning, written, report):
    runs = [tuning(level) for level in ("grid", "heads", "lora", "search")]
    assert read_reports([written(runs)]) == runs
    assert read_reports([written(tuning("heads", phases=False)), written(report(18.0, 25.0, 47.0), "other.json")])
    assert runs[0].schema_version == 1  # counted apart from the measurements'


def test_what_overflowed_is_null_in_json_and_infinite_here(tuning, written):
    run = tuning("grid")
    path = written(run, "tune.json")
    value = json.loads(path.read_text())
    for score in (value["points"][3]["score"], value["plain"]):
        score.update(target=None, window=None, objective=None, documents=0)
    value["base"].update(target=None, objective=None)
    path.write_text(json.dumps(value))
    (read,) = read_reports([path])
    overflowed = Score(math.inf, math.inf, math.inf, 0)
    assert read.points[3] == replace(run.points[3], score=overflowed)
    assert read.plain == overflowed
    assert read.base == replace(run.base, target=math.inf, objective=math.inf)
    assert read.points[:3] == run.points[:3]


def test_what_the_tuning_writes_is_read(tuning, tmp_path):
    """By the code that writes tune.json, overflows and all."""
    from ropecli.evaluate.report import write_report
    from ropecli.tune.reporting import files_of

    run = tuning("heads")
    run.points[2] = replace(run.points[2], score=Score(math.inf, math.inf, math.inf, 0))
    for name, value in files_of(run).items():
        write_report(tmp_path / name, value)
        assert read_reports([tmp_path / name]) == [run]


def in_point(**changes):
    return lambda one: one["points"][0].update(changes)


def in_score(where, **changes):
    return lambda one: (one["points"][0] if where == "point" else one)["score"].update(changes)


def in_gains(**changes):
    return lambda one: one["gains"][0].update(changes)


CHANGES_OF_TUNING = {
    "a newer schema": (lambda one: one.update(schema_version=2), "schema_version 2; this release reads 1: update"),
    "no schema": (lambda one: one.pop("schema_version"), "should have schema_version 1, and has none"),
    "no environment": (lambda one: one.pop("environment"), "environment"),
    "no points": (lambda one: one.update(points=[]), "0 points"),
    "points that are no list": (lambda one: one.update(points="many"), "points: "),
    "points that are no points": (lambda one: one.update(points=[3, None]), "points.0: "),
    "a score that is a number": (in_point(score=1.0), "points.0.score: "),
    "no score": (lambda one: one["points"][0].pop("score"), "points.0.score: "),
    "no documents": (in_score("point", documents=0), "point 1: documents must be above 0"),
    "documents that are null": (in_score("point", documents=None), "points.0.score.documents: "),
    "a negative loss": (in_score("point", target=-0.1), "point 1: a loss must be from 0 to 700 nats"),
    "a loss beyond exp": (in_score("point", window=1000.0, objective=1e3), "a loss must be"),
    "an objective below its parts": (in_score("point", objective=0.0), "objective must not be below target"),
    "a huge objective": (in_score("point", objective=1e200), "objective must be a number of nats"),
    "a result that overflowed": (in_score("result", target=None), "score: it is infinite"),
    "a loss in words": (in_score("point", target="low"), "points.0.score.target: "),
    "negative seconds": (in_point(seconds=-1.0), "point 1: seconds, step and learned must not be negative"),
    "endless seconds": (in_point(seconds=1e300), "point 1: seconds"),
    "seconds that are null": (in_point(seconds=None), "points.0.seconds: "),
    "a step below zero": (in_point(step=-1), "point 1: seconds, step"),
    "a step that is half": (in_point(step=0.5), "points.0.step: "),
    "a point's factor": (in_point(factor=0.0), "point 1: factor"),
    "parameters that are a list": (in_point(params=[]), "points.0.params: "),
    "a factor below 1": (lambda one: one.update(factor=0.5), "factor must be at least 1"),
    "a window of zero": (lambda one: one.update(original_max_position_embeddings=0), "original_max_position"),
    "a target of zero": (lambda one: one.update(target_length=0), "target_length"),
    "a huge target": (lambda one: one.update(target_length=10**20), "target_length"),
    "no attention at all": (lambda one: one.update(attention_factor=0.0), "attention_factor"),
    "fewer than no numbers learned": (lambda one: one.update(learned=-1), "learned"),
    "a temperature beyond all": (lambda one: one.update(log_temperature=1e3), "log_temperature"),
    "no frequencies": (lambda one: one.update(inv_freq=[], pretrained_inv_freq=[]), "inv_freq has 0 pairs"),
    "frequencies of other pairs": (lambda one: one["inv_freq"].pop(), "inv_freq has 15 pairs and pretrained"),
    "a negative frequency": (lambda one: one["inv_freq"].__setitem__(0, -1.0), "inv_freq holds what is no frequency"),
    "a subnormal frequency": (lambda one: one["pretrained_inv_freq"].__setitem__(3, 1e-310), "pretrained_inv_freq ho"),
    "a frequency that is null": (lambda one: one["inv_freq"].__setitem__(0, None), "inv_freq.0: "),
    "gains of uneven heads": (in_gains(log_gain=[[0.0], [0.0, 0.0]]), "log_gain must hold as many pairs"),
    "gains of no heads": (in_gains(log_gain=[]), "log_gain must hold as many pairs"),
    "gains of no pairs": (in_gains(log_gain=[[], []]), "log_gain must hold as many pairs"),
    "gains that are flat": (in_gains(log_gain=[0.0, 0.0]), "gains.0.log_gain.0: "),
    "huge gains": (in_gains(log_gain=[[1e3] * 16] * 4), "within ±50"),
    "gains that are null": (in_gains(log_gain=[[None] * 16] * 4), "gains.0.log_gain.0.0: "),
    "phases of other pairs": (in_gains(phase=[[0.0] * 3] * 4), "phase must be empty, or as log_gain is"),
    "gains of thousands of layers": (lambda one: one.update(gains=one["gains"][:1] * 1001), "gains of 1001 layers"),
    "a name of a layer that is long": (in_gains(name="n" * 10**6, log_gain=[]), "gains of 'nnn"),
    "half a surrogate": (lambda one: one.update(checkpoint="\ud800"), "JSON"),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES_OF_TUNING.values(), ids=CHANGES_OF_TUNING)
def test_a_damaged_tuning_is_refused(tuning, written, change, expected):
    path = written(tuning("heads"), "tune.json")
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(DataError) as caught:
        read_reports([path])
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_tuning_of_too_many_points_is_refused(tuning, written, monkeypatch):
    run = tuning("grid")
    path = written(run)
    monkeypatch.setattr("ropecli.report.tuned.faults._MOST_POINTS", len(run.points))
    assert read_reports([path]) == [run]
    monkeypatch.setattr("ropecli.report.tuned.faults._MOST_POINTS", 9)
    with pytest.raises(DataError, match=rf"it has {len(run.points)} points; 1 to 9 were expected"):
        read_reports([path])
