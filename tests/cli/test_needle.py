"""ropecli needle: any needle in any text, one JSON document or one message."""

import json

import pytest

from ropecli.evaluation.retrieval_prompts import STYLES


@pytest.fixture
def ask(ropecli, llama, corpus):
    def call(*options, checkpoint=llama, data=corpus, lengths="80,150"):
        return ropecli("needle", checkpoint, "--data", data, "--lengths", lengths, "--trials", 2, *options)

    return call


OWN = ("--needle", "the {name} is {key}", "--question", "what is the {name}? it is")


def test_the_report_says_how_it_was_asked(ask, corpus):
    outcome = ask("--json", "--style", "code", "--depths", "1,0,0.5")
    report = json.loads(outcome.out)
    assert outcome.code == 0
    assert (report["kind"], report["task"], report["source"]) == ("scores", "needle", str(corpus))
    assert [(cell["length"], cell["depth"], cell["chance"]) for cell in report["cells"]] == [
        (length, depth, 0.1) for length in (80, 150) for depth in (0, 0.5, 1)
    ]
    assert report["settings"]["mode"] == "rank"
    assert report["settings"]["needle"] == STYLES["code"].needle
    assert report["command"][:2] == ["ropecli", "needle"]


def test_needles_of_ones_own(ask):
    outcome = ask("--json", *OWN, "--keys", 3, "--candidates", 5, lengths="250")
    report = json.loads(outcome.out)
    assert (report["settings"]["needle"], report["settings"]["question"]) == OWN[1::2]
    assert (report["settings"]["keys"], report["settings"]["candidates"]) == (3, 5)
    assert report["cells"][0]["chance"] == 0.2
    assert report["settings"]["style"] is None


@pytest.mark.parametrize("command", ["passkey", "needle"])
def test_a_stopped_search_in_several_checkpoints_resumes(ropecli, llama, corpus, edited, stopping, tmp_path, command):
    """Within the second checkpoint: 2 lengths, 2 depths, 2 prompts."""
    checkpoints, output = [llama, edited(llama, rms_norm_eps=1e-3)], tmp_path / "reports.json"
    options = ["--lengths", "280,330", "--depths", "0,1", "--trials", 2, "--device", "cpu"]
    options += ["--data", corpus] if command == "needle" else []
    with stopping(11):
        assert ropecli(command, *checkpoints, *options, "--output", output).code == 130
    with stopping(0) as samples:
        resumed = ropecli(command, *checkpoints, *options, "--output", output, "--resume")
    assert resumed.code == 0, resumed.err
    assert len(samples) == 5
    alone = [json.loads(ropecli(command, checkpoint, *options, "--json").out) for checkpoint in checkpoints]
    reports = json.loads(output.read_text())
    assert [report["checkpoint"] for report in reports] == list(map(str, checkpoints))
    assert [report["cells"] for report in reports] == [report["cells"] for report in alone]
    assert alone[0]["cells"] != alone[1]["cells"]
    assert not (tmp_path / "reports.json.state").exists()


def test_compare_asks_for_the_same_needles(ropecli, ask, llama, corpus):
    options = ["--measure", "needle", "--methods", "none,yarn", "--lengths", "280,330", "--samples", 2, "--json"]
    compared = json.loads(ropecli("compare", llama, "--data", corpus, *options).out)
    alone = json.loads(ask("--method", "yarn", "--factor", 4, "--json", lengths="280,330").out)
    assert [report["method"] for report in compared] == ["none", "yarn"]
    assert [compared[1][key] for key in ("cells", "fingerprint")] == [alone[key] for key in ("cells", "fingerprint")]
