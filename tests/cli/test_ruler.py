"""ropecli ruler: reports, several checkpoints, resuming, messages."""

import json

import pytest


@pytest.fixture
def ask(ropecli):
    def call(*options, checkpoints=("demo",)):
        return ropecli(
            "ruler", *checkpoints, "--tasks", "fwe,niah_single_1", "--mode", "rank", "--samples", 2, *options
        )

    return call


def test_two_checkpoints_side_by_side(ask, ropecli, tmp_path):
    assert ropecli("patch", "demo", "--method", "yarn", "--factor", 4, "--output", tmp_path / "patched").code == 0
    report, picture = tmp_path / "ruler.json", tmp_path / "ruler.png"
    outcome = ask(
        "--lengths", "512,600", "--output", report, "--plot", picture, checkpoints=("demo", tmp_path / "patched")
    )
    assert outcome.code == 0, outcome.err
    first, second = json.loads(report.read_text())
    assert first["fingerprint"] == second["fingerprint"]
    assert {(cell["task"], cell["length"], len(cell["sums"])) for cell in first["cells"]} == {
        (task, length, 2) for task in ("niah_single_1", "fwe") for length in (512, 600)
    }
    mean = sum(sum(cell["sums"]) for cell in second["cells"] if cell["length"] == 512) / 4
    assert second["threshold"] == pytest.approx(0.856 * mean)
    assert "Effective length: " in outcome.out
    assert "Not comparable with published tables: the essay is the demo's text; answers were ranked" in " ".join(
        outcome.out.split()
    )
    assert picture.stat().st_size > 1000
    page = tmp_path / "page.html"
    assert ropecli("report", report, "--output", page).code == 0
    assert "niah_single_1" in page.read_text()


def test_a_model_that_answers_nothing_has_no_effective_length(ropecli):
    outcome = ropecli("ruler", "demo", "--lengths", "400", "--tasks", "fwe", "--samples", 1)
    assert "Effective length: none, because no answer was right. For a base model" in " ".join(outcome.out.split())


def test_a_model_that_guesses_has_no_effective_length(ropecli, llama, tmp_path):
    """Its weights are random."""
    report, page = tmp_path / "ruler.json", tmp_path / "page.html"
    options = ["--mode", "rank", "--lengths", "1200,1300", "--tasks", "fwe,niah_single_1", "--samples", 10]
    outcome = ropecli("ruler", llama, *options, "--output", report)
    assert outcome.code == 0, outcome.err
    values = json.loads(report.read_text())[0]
    assert sum(sum(cell["sums"]) for cell in values["cells"] if cell["length"] == 1200) > 0
    assert values["effective_length"] is None
    reason = "Effective length: none, because the score at 1200 tokens, "
    assert reason in " ".join(outcome.out.split())
    assert "is not above that of guessing" in " ".join(outcome.out.split())
    assert ropecli("report", report, "--output", page).code == 0
    assert reason in page.read_text()


def test_an_interrupted_run_resumes(ask, tmp_path, stopping):
    whole, report = tmp_path / "whole.json", tmp_path / "ruler.json"
    options = ["--lengths", "512", "--seed", 3]
    assert ask(*options, "--output", whole).code == 0
    with stopping(3) as samples:
        assert ask(*options, "--output", report).code == 130
        assert ask(*options[:-1], 4, "--output", report, "--resume").code == 2
        assert ask(*options, "--output", report, "--resume").code == 0
    assert len(samples) == 4
    kept = [json.loads(path.read_text())[0]["cells"] for path in (whole, report)]
    assert kept[0] == kept[1]


def squad(answers) -> str:
    """SQuAD's JSON with a paragraph of 60 words for each answer."""
    paragraphs = [
        {
            "context": f"Paragraph {number}. " + "Many words stand here. " * 15,
            "qas": [{"question": f"Which answer has {number}?", "answers": [{"text": answer}]}],
        }
        for number, answer in enumerate(answers)
    ]
    return json.dumps({"data": [{"paragraphs": paragraphs}]})


COMPARE = ["compare", "demo", "--data", "demo", "--methods", "none", "--measure", "ruler", "--tasks", "fwe"]
RULER = ["ruler", "demo", "--tasks", "qa_1", "--squad", "squad.json"]


@pytest.mark.parametrize(
    ("command", "change", "named"),
    [
        (COMPARE, ["--dtype", "bfloat16"], "dtype: 'float32' then, 'bfloat16' now"),
        (COMPARE, ["--attn", "eager"], "attn: 'auto' then, 'eager' now"),
        (RULER, [], "prompts: "),
    ],
    ids=["dtype", "attention", "questions"],
)
def test_a_run_does_not_resume_with_other_settings(ropecli, tmp_path, monkeypatch, stopping, command, change, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "squad.json").write_text(squad(["blue", *["red"] * 20]))
    command = [*command, "--lengths", "512", "--samples", 2, "--output", "report.json"]
    with stopping(1):
        assert ropecli(*command).code == 130
    (tmp_path / "squad.json").write_text(squad(["blue", *["green"] * 20]))  # the first question is the same
    outcome = ropecli(*command, "--resume", *change)
    assert outcome.code == 2
    assert named in " ".join(outcome.err.split())


def test_compare_puts_measures_side_by_side(ropecli, tmp_path):
    report, same = tmp_path / "measures.json", ["--lengths", 512, "--samples", 2, "--tasks", "fwe"]
    options = ["--methods", "none,yarn", "--measure", "ppl,ruler", "--max-documents", 2, "--protocol", "tail"]
    outcome = ropecli("compare", "demo", "--data", "demo", *same, *options, "--output", report)
    assert outcome.code == 0, outcome.err
    found = json.loads(report.read_text())
    assert [(one["task"], one["method"]) for one in found] == [
        ("tail", "none"),
        ("tail", "yarn"),
        ("ruler", "none"),
        ("ruler", "yarn"),
    ]
    options = ["--mode", "rank", "--method", "yarn", "--factor", 4, "--json"]
    alone = json.loads(ropecli("ruler", "demo", *same, *options).out)
    assert found[3]["cells"] == alone[0]["cells"]
    assert found[3]["fingerprint"] == alone[0]["fingerprint"]
    assert "RULER (rank, %) at 512" in outcome.out
    assert f"{found[1]['rows'][0]['ppl']:.2f}" in outcome.out
