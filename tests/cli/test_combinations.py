"""Combined methods on the command line: patch, inspect, patch again, revert, compare, tune and recipes."""

import json

import pytest
import yaml

COMBINED = "yarn+resonance"


@pytest.fixture
def combined(ropecli, llama, tmp_path):
    output = tmp_path / "combined"
    options = ["--method", COMBINED, "--factor", 4, "--set", "beta_fast=8"]
    outcome = ropecli("patch", llama, *options, "--output", output)
    assert outcome.code == 0, outcome.err
    assert "yarn+resonance ×4, 256 tokens" in outcome.out
    assert "Proved: in stock transformers, 1 rotary table matches" in outcome.out
    return output


def test_the_folder_remembers_the_combination(ropecli, llama, combined, tmp_path):
    scaling = yaml.safe_load((combined / "ropecli.yaml").read_text())["scaling"]
    assert (scaling["method"], scaling["factor"], scaling["params"]) == (COMBINED, 4.0, {"beta_fast": 8})
    report = json.loads(ropecli("inspect", combined, "--json").out)
    assert (report["method"], report["params"]["beta_fast"], report["findings"]) == (COMBINED, 8, [])
    again = tmp_path / "again"
    assert ropecli("patch", combined, "--method", "yarn+rerope", "--factor", 4, "-o", again).code == 0
    assert "yarn+rerope" in ropecli("inspect", again).out
    assert ropecli("patch", again, "--revert", "-o", tmp_path / "back").code == 0
    assert (tmp_path / "back" / "config.json").read_bytes() == (llama / "config.json").read_bytes()


def test_compare_has_a_row_for_each(ropecli, llama, corpus):
    fixed = ["--data", corpus, "--lengths", 64, "--max-documents", 2, "--json"]
    settings = ["--set", "abf+cope.beta=5", "--set", "yarn+rerope.frequency_factor=2"]
    outcome = ropecli("compare", llama, "--methods", "yarn+resonance,abf+cope,yarn+rerope", *settings, *fixed)
    assert outcome.code == 0, outcome.err
    reports = json.loads(outcome.out)
    assert [report["method"] for report in reports] == ["yarn+resonance", "abf+cope", "yarn+rerope"]
    assert len({report["rows"][0]["ppl"] for report in reports}) == 3
    assert reports[2]["params"]["frequency_factor"] == 2


def test_what_cannot_be_combined_is_one_message(ropecli, llama, tmp_path):
    outcome = ropecli("patch", llama, "--method", "yarn+linear", "--factor", 4, "-o", tmp_path / "out")
    assert (outcome.code, outcome.out) == (2, "")
    assert "Cannot combine yarn+linear. Expected at most one of" in " ".join(outcome.err.split())
