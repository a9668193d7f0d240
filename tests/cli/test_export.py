"""`ropecli export`: one line to paste on standard output, or a config file; exit status 2 where there is none."""

import json
import shlex

import pytest

KEYS = {"engine", "command", "overrides", "cannot", "notes", "findings"}


@pytest.mark.parametrize("engine", ["llama.cpp", "mlx", "sglang", "vllm"])
def test_standard_output_is_one_line_to_paste(engine, yarn, ropecli):
    outcome = ropecli("export", yarn, "--engine", engine).succeeds()
    assert outcome.out.count("\n") == 1
    assert "note: " in outcome.err or engine == "mlx"
    if engine in ("vllm", "sglang"):
        words = shlex.split(outcome.out)
        assert str(yarn) in words
        assert json.loads(next(word for word in words if word.startswith("{")))["max_position_embeddings"] == 256
    report = ropecli("export", yarn, "--engine", engine, "--json").json()
    assert set(report) == KEYS
    assert (report["engine"], report["command"]) == (engine, outcome.out.strip())
    assert all(sentence in outcome.err for sentence in (*report["cannot"], *report["notes"]))


def test_a_finding_of_inspect_that_changes_results_is_repeated(llama, edited, ropecli):
    """yarn ×2 with a context length of 4 times the pretraining length; `inspect` prints the same sentence."""
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    beyond = {"rope_parameters": {"rope_theta": 1e4, **scaling}, "rope_scaling": scaling, "rope_theta": 1e4}
    folder = edited(llama, **beyond, max_position_embeddings=256)
    inspected = ropecli("inspect", folder, "--json").json()["findings"]
    (finding,) = [finding for finding in inspected if finding["changes_results"]]
    outcome = ropecli("export", folder, "--engine", "vllm").succeeds()
    assert outcome.out.count("\n") == 1
    assert f"context-beyond-scaling: {finding['message']}" in outcome.said
    assert f"fix: {finding['fix']}" in outcome.said
    assert "same results" not in outcome.err
    assert ropecli("export", folder, "--engine", "vllm", "--json").json()["findings"] == [finding]


@pytest.mark.parametrize("engine", ["axolotl", "ollama", "unsloth"])
def test_a_config_file_is_printed_or_written(engine, yarn, ropecli, tmp_path):
    """Standard output is the file, to be redirected; with --output it is written, and the command is printed."""
    printed, path = ropecli("export", yarn, "--engine", engine), tmp_path / "its config"
    written = ropecli("export", yarn, "--engine", engine, "--output", path)
    assert path.read_text() == printed.out
    assert shlex.split(written.out)[-1] == str(path)
    report = ropecli("export", yarn, "--engine", engine, "--json").json()
    assert set(report) == KEYS
    assert f"then run: {report['command']}" in printed.err
    assert "256" in str(report["overrides"])
