"""Reports come back from JSON as they were; what is no report is refused, with the file and what was expected."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from ropecli.errors import DataError
from ropecli.report.reading import read_reports


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
    "an unknown kind": (lambda one: one.update(kind="speed"), "its 'kind' is 'speed'; 'perplexity' or 'retrieval'"),
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
