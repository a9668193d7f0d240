"""ropecli ruler: reports, and several checkpoints."""

import json

import pytest

FEW = ["--mode", "rank", "--samples", 2]
TASKS = ["--tasks", "fwe,niah_single_1"]


def test_two_checkpoints_side_by_side(ropecli, patched, tmp_path):
    from ropecli.demo import FOLDER

    report, picture, page = (tmp_path / name for name in ("ruler.json", "ruler.png", "page.html"))
    options = ["--lengths", "512,600", "--output", report, "--plot", picture]
    outcome = ropecli("ruler", "demo", patched(FOLDER, "yarn"), *TASKS, *FEW, *options).succeeds()
    first, second = json.loads(report.read_text())["reports"]
    assert first["fingerprint"] == second["fingerprint"]
    assert {(cell["task"], cell["length"], len(cell["sums"])) for cell in first["cells"]} == {
        (task, length, 2) for task in ("niah_single_1", "fwe") for length in (512, 600)
    }
    mean = sum(sum(cell["sums"]) for cell in second["cells"] if cell["length"] == 512) / 4
    assert second["threshold"] == pytest.approx(0.856 * mean)
    assert "Effective length: " in outcome.out
    note = "Not comparable with published tables: the essay is the demo's text; answers were ranked"
    assert note in outcome.printed
    assert picture.stat().st_size > 1000
    ropecli("report", report, "--output", page).succeeds()
    assert "niah_single_1" in page.read_text()


def test_a_model_that_answers_nothing_has_no_effective_length(ropecli):
    outcome = ropecli("ruler", "demo", "--lengths", "400", "--tasks", "fwe", "--samples", 1)
    assert "Effective length: none, because the score at 400 tokens, 0.0% (0 to 79), is not above" in outcome.printed
    assert "For a base model, use --mode rank." in outcome.printed


def test_a_model_that_guesses_has_no_effective_length(ropecli, llama, tmp_path):
    """Its weights are random."""
    options = ["--mode", "rank", "--lengths", "1200,1300", *TASKS, "--samples", 10]
    outcome = ropecli("ruler", llama, *options, "--output", tmp_path / "ruler.json").succeeds()
    [report] = json.loads((tmp_path / "ruler.json").read_text())["reports"]
    assert sum(sum(cell["sums"]) for cell in report["cells"] if cell["length"] == 1200) > 0
    assert report["effective_length"] is None
    assert "Effective length: none, because the score at 1200 tokens, " in outcome.printed
    assert "is not above that of guessing" in outcome.printed
