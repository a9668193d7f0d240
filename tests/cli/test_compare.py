"""ropecli compare: a table, a plot and a report file of the same numbers."""

import json

import pytest


@pytest.fixture
def compare(ropecli, llama, corpus):
    def call(*options, methods="none,linear,yarn", lengths="24,64,128"):
        fixed = ["--lengths", lengths, "--max-documents", 4, "--methods", methods]
        return ropecli("compare", llama, "--data", corpus, *fixed, *options)

    return call


def test_json_is_all_that_is_on_standard_output(compare):
    outcome = compare("--json", "--factors", "2,4")
    reports = json.loads(outcome.out)
    assert outcome.code == 0
    assert [(report["method"], report["factor"]) for report in reports] == [
        ("none", 1.0),
        ("linear", 2.0),
        ("linear", 4.0),
        ("yarn", 2.0),
        ("yarn", 4.0),
    ]
    assert all([row["length"] for row in report["rows"]] == [24, 64, 128] for report in reports)
    assert len({report["fingerprint"] for report in reports}) == 1


def test_plot_and_report_are_written_beside_the_table(compare, tmp_path):
    outcome = compare("--plot", tmp_path / "plot.png", "--output", tmp_path / "reports.json")
    assert outcome.code == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    reports = json.loads((tmp_path / "reports.json").read_text())
    for report in reports:
        line = next(line for line in outcome.out.splitlines() if line.strip("│ ").startswith(report["method"]))
        assert [cell.strip() for cell in line.split("│")[2:-1]] == [f"{row['ppl']:.2f}" for row in report["rows"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plot.png", "reports.json"]
