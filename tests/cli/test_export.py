"""`ropecli export`: one line to paste on standard output, the rest beside it; exit status 2 where there is none."""

import json
import shlex

import pytest

ENGINES = ["llama.cpp", "mlx", "sglang", "vllm"]
WITH_FILE = ["axolotl", "ollama", "trl"]


@pytest.mark.parametrize("engine", ENGINES)
def test_standard_output_is_one_line_to_paste(engine, yarn, ropecli):
    outcome = ropecli("export", yarn, "--engine", engine)
    assert outcome.code == 0
    assert outcome.out.count("\n") == 1
    if engine in ("vllm", "sglang"):
        words = shlex.split(outcome.out)
        assert str(yarn) in words
        assert json.loads(next(word for word in words if word.startswith("{")))["max_position_embeddings"] == 256


@pytest.mark.parametrize("engine", ENGINES)
def test_json(engine, yarn, ropecli):
    plain = ropecli("export", yarn, "--engine", engine)
    outcome = ropecli("export", yarn, "--engine", engine, "--json")
    report = json.loads(outcome.out)
    assert set(report) == {"engine", "command", "overrides", "cannot", "notes"}
    assert (report["engine"], report["command"]) == (engine, plain.out.strip())
    assert all(sentence in plain.err for sentence in (*report["cannot"], *report["notes"]))


@pytest.mark.parametrize("engine", WITH_FILE)
def test_a_config_file(engine, yarn, ropecli, tmp_path):
    """Standard output is the file, to be redirected; with --output it is written, and the command is printed."""
    printed, path = ropecli("export", yarn, "--engine", engine), tmp_path / "its config"
    written = ropecli("export", yarn, "--engine", engine, "--output", path)
    assert path.read_text() == printed.out
    assert shlex.split(written.out)[-1] == str(path)
    report = json.loads(ropecli("export", yarn, "--engine", engine, "--json").out)
    assert set(report) == {"engine", "command", "overrides", "cannot", "notes"}
    assert f"then run: {report['command']}" in printed.err
    assert 256 in report["overrides"].values()


def test_a_config_file_is_not_overwritten(yarn, ropecli, tmp_path):
    """The user adds a dataset to it."""
    edited = tmp_path / "trl.yaml"
    edited.write_text("dataset_name: mine")
    outcome = ropecli("export", yarn, "--engine", "trl", "--output", edited)
    assert (outcome.code, edited.read_text()) == (2, "dataset_name: mine")
    assert "trl.yaml exists" in outcome.err
    outcome = ropecli("export", yarn, "--engine", "vllm", "--output", tmp_path / "new")
    assert (outcome.code, outcome.out) == (2, "")
    assert "needs no config file" in outcome.err


def test_the_embedded_checkpoint_is_named_by_its_folder(ropecli):
    from ropecli import demo

    outcome = ropecli("export", "demo", "--engine", "vllm")
    assert str(demo.FOLDER) in shlex.split(outcome.out)


def test_what_an_engine_cannot_express(llama, edited, ropecli):
    """No command then, and one message that says why and what to do."""
    factors = [1.0] * 15 + [4.0]
    scaling = {"rope_type": "longrope", "factor": 4.0, "short_factor": factors, "long_factor": factors}
    folder = edited(llama, rope_scaling={**scaling, "original_max_position_embeddings": 64}, rope_parameters=...)
    outcome = ropecli("export", folder, "--engine", "llama.cpp")
    assert (outcome.code, outcome.out) == (2, "")
    assert "rope_factors_long.weight" in outcome.err
    assert "Or patch with yarn." in outcome.err
