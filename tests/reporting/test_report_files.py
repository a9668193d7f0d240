"""Reports round-trip through JSON; invalid files are refused with the file name and what was expected."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import ropecli
from ropecli.errors import DataError
from ropecli.evaluation.kinds import as_json
from ropecli.evaluation.report import ARMS, Cell
from ropecli.reporting.report_files import read_reports


def test_reports_round_trip(report, with_baseline, retrieval, written):
    first, scores = report(18.0, 25.0, 47.0), retrieval({(256, 0.0): 4})
    ranked = replace(scores, cells=[replace(scores.cells[0], chance=0.1)])
    files = [written([first, *with_baseline], "several.json"), written(ranked)]
    assert read_reports(files) == [first, *with_baseline, ranked]


def test_the_page_names_what_is_written(report, with_baseline, retrieval):
    """The README's section on JSON, against reports of each kind."""
    page = Path(ropecli.__file__).parent / "evaluation" / "README.md"
    section = page.read_text("utf-8").partition("\n## JSON\n")[2].partition("\n## ")[0]
    table, _, rows = section.partition("\n`value` is")
    cells = [
        Cell(arm, 256, sums, (10.0,) * 2, tokens=20)
        for arm, sums in zip(ARMS, ((30, 32), (10, 11), (9, 11)), strict=True)
    ]
    recall = report(1.0, 1.0, 1.0, task="recall", cells=cells)
    recall = replace(recall, reference=recall.as_reference())
    scores = retrieval({(256, "vt"): 3}, task="ruler")
    values = [value for reports in (with_baseline, [recall], [scores]) for value in as_json(reports)["reports"]]
    keys = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert set(re.findall("`([a-z_]+)`", " ".join(keys))) == {key for value in values for key in value}
    of_rows = {"length", "value", "low", "high", "n", *re.findall("`([a-z_]+)`", rows)}
    assert of_rows == {key for value in values for row in value["rows"] for key in row}


def change_of(*path, **changes):
    """A change of the values at a path of keys in a report."""

    def change(report):
        for key in path:
            report = report[key]
        report.update(changes)

    return change


OTHER = "has no reports of this version of ropecli:"
DAMAGED = {
    "another schema": ("prefix", change_of(schema_version=2), f"{OTHER} its schema_version is 2"),
    "a missing field": (
        "prefix",
        lambda value: value["reports"][0].pop("fingerprint"),
        "report 1 is invalid: fingerprint: Field required",
    ),
    "an unknown task": (
        "prefix",
        change_of("reports", 0, task="prefx"),
        "report 1 is invalid: task 'prefx'; expected prefix",
    ),
    "a depth beyond the end": ("needle", change_of("reports", 0, "cells", 0, depth=1.5), "cells.0.depth: "),
}


@pytest.mark.parametrize(("kind", "change", "expected"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_report_is_refused(report, retrieval, tmp_path, kind, change, expected):
    value = {
        "prefix": lambda: as_json([report(18.0, 25.0, 47.0)]),
        "needle": lambda: as_json([retrieval({(256, 0.0): 4})]),
    }[kind]()
    value = json.loads(json.dumps(value))
    change(value)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(value))
    with pytest.raises(DataError) as caught:
        read_reports([path])
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[" * 100_000, b"\x80\x81"], ids=["nothing", "object", "deep", "no text"]
)
def test_a_file_without_a_report_is_refused(tmp_path, text):
    (tmp_path / "report.json").write_bytes(text)
    with pytest.raises(DataError, match=r"report\.json (has no reports|cannot be read)"):
        read_reports([tmp_path / "report.json"])
