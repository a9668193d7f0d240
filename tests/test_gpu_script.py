"""`scripts/gpu` on the CPU, at toy size."""

import json
import subprocess
import sys

import pytest
import scripts_by_path

pytestmark = pytest.mark.slow


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """gpu(*arguments) -> the finished dry run; results are in tmp_path/results."""
    monkeypatch.setenv("PYTHON", sys.executable)

    def run(*arguments) -> subprocess.CompletedProcess:
        command = [scripts_by_path.SCRIPTS / "gpu", "--dry-run", "--output", tmp_path / "results", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    return run


def test_every_part_measures_something(gpu, tmp_path):
    run = gpu()
    assert run.returncode == 0, run.stdout + run.stderr
    reports = [json.loads(file.read_text()) for file in sorted((tmp_path / "results").glob("*.json"))]
    assert len(reports) == 6
    rows = [row for report in reports for table in report["tables"].values() for row in table]
    assert not [row for row in rows if "note" in row or row.get("ok") is False]
    ratios = [
        row["ratio"] for report in reports if report["part"] == "plan" for row in report["tables"]["memory of a step"]
    ]
    assert min(ratios) > 0.9
    assert max(ratios) < 1.1
    tables = (tmp_path / "results" / "results.md").read_text()
    assert tables.count("\n| ---") == sum(len(report["tables"]) for report in reports)


def test_a_failed_part_does_not_stop_the_next(gpu, tmp_path):
    run = gpu("plan", "attention")  # the first needs the results of another
    assert run.returncode == 1
    assert "run scripts/gpu train first" in run.stdout
    assert "attention: done" in run.stdout
    assert "Failed: plan." in run.stderr


def test_parts_beyond_the_budget_are_named(gpu):
    run = gpu("train", "--budget", "10s")
    assert "train: not run, no time left of --budget" in run.stdout
    assert "expected a time such as 25m" in gpu("--budget", "25").stderr
    assert "unknown part trian" in gpu("trian").stderr
