"""`ropecli tune`: every level from the command line to a folder that stock transformers loads; stopped and resumed."""

import json
import signal
import time

import pytest
import torch
import yaml

FEW = ["--max-documents", 10, "--targets", 16, "--device", "cpu"]
POINTS, STEPS = ["--points", 3], ["--steps", 4, "--batch-size", 2]
FEW_BY_LEVEL = {"grid": POINTS, "heads": [*POINTS, *STEPS], "search": ["--population", 4, "--iterations", 1]}
TIMES = ("seconds", "command")
LEVELS = {level: ["--level", level] for level in FEW_BY_LEVEL}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two threads on two cores that others use take longer than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def arguments(llama, corpus):
    def make(output, *options, checkpoint=llama):
        level = options[options.index("--level") + 1] if "--level" in options else "heads"
        few = [*FEW, *FEW_BY_LEVEL[level]]
        fixed = ["tune", checkpoint, "--data", corpus, "--factor", 2, *few, "--output", output]
        return [str(word) for word in (*fixed, *options)]

    return make


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, arguments, one_thread):
    """tuned(level) -> the folder that a level gave, and what the command printed; made once."""
    from typer.testing import CliRunner

    from ropecli.cli.app import app

    made = {}

    def make(level):
        if level not in made:
            output = tmp_path_factory.mktemp(level) / "out"
            result = CliRunner().invoke(app, arguments(output, *LEVELS[level]), env={"COLUMNS": "200"})
            assert result.exit_code == 0, result.output
            made[level] = output, result.stdout
        return made[level]

    return make


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in TIMES}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def read_report(folder):
    return json.loads((folder / "tune.json").read_text())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_from_end_to_end(tuned, llama, config_of, level):
    folder, out = tuned(level)
    report = read_report(folder)
    method = "longrope" if level == "search" else "yarn"
    assert (report["level"], report["method"], report["factor"], report["target_length"]) == (level, method, 2.0, 128)
    assert report["seconds"] == pytest.approx(sum(point["seconds"] for point in report["points"]))
    record = yaml.safe_load((folder / "ropecli.yaml").read_text())
    assert (record["scaling"]["method"], record["tuned"]["level"]) == (method, level)
    assert record["tuned"]["weights_changed"] == (report["step"] > 0)
    assert config_of(folder)["rope_parameters"]["rope_type"] == method
    expected = {path.name for path in llama.iterdir()} | {"ropecli.yaml", "tune.json"}
    assert set(names(folder)) == expected | ({"factors.json"} if level == "search" else set())
    assert names(folder.parent) == ["out"]
    assert f"{llama} → {folder}: {method} ×2, 128 tokens" in out
    assert "Proved: in stock transformers, 1 rotary table matches" in out
    assert f"ropecli eval-ppl {folder} --baseline {llama}" in out


def test_the_factors_of_a_search_are_a_file_for_longrope(tuned, ropecli, llama, tmp_path, config_of):
    folder, _ = tuned("search")
    options = ["--method", "longrope", "--factor", 2, "--factors-file", folder / "factors.json"]
    ropecli("patch", llama, *options, "--output", tmp_path / "out").succeeds()
    assert config_of(folder) == config_of(tmp_path / "out")


def test_json_is_the_report(ropecli, arguments, tmp_path):
    report = ropecli(*arguments(tmp_path / "out", "--level", "grid", "--methods", "ntk,yarn", "--json")).json()
    assert report == read_report(tmp_path / "out")
    assert {point["method"] for point in report["points"]} == {"ntk", "yarn"}
    assert report["settings"]["methods"] == ["ntk", "yarn"]
    assert report["command"][:2] == ["ropecli", "tune"]


# What was written, and the other commands.


def test_tuned_weights_are_not_reverted_and_not_tuned_again(tuned, ropecli, arguments, llama, tmp_path):
    folder, _ = tuned("heads")
    output = tmp_path / "out"
    ropecli("revert", folder, "-o", output).is_refused("changed the weights", llama)
    ropecli(*arguments(output, checkpoint=folder)).is_refused("is already tuned", llama)
    # nor by way of another patch
    ropecli("patch", folder, "--method", "ntk", "--factor", 2, "-o", tmp_path / "patched").succeeds()
    ropecli("revert", tmp_path / "patched", "-o", output).is_refused("changed the weights", llama)
    assert "tune.json" not in names(tmp_path / "patched")


def test_tuned_weights_under_another_scaling_are_warned_of(tuned, ropecli, corpus, llama, tmp_path):
    folder, _ = tuned("heads")
    same = [f"--set={key}={value}" for key, value in read_report(folder)["params"].items()]
    warning = f"were tuned for yarn ×2{' (' if same else ''}"
    for number, (options, warned) in enumerate(
        [
            (["--method", "yarn", "--factor", 2, *same], False),
            (["--method", "yarn", "--factor", 2, "--set", "beta_fast=9"], True),
            (["--method", "none"], True),
        ]
    ):
        outcome = ropecli("patch", folder, *options, "-o", tmp_path / f"{number}").succeeds()
        assert (warning in outcome.err) == (str(llama) in outcome.err) == warned
    # whatever it was patched to since
    assert warning in ropecli("patch", tmp_path / "2", "--method", "yarn", "--factor", 4, "--dry-run").err
    few = ["--data", corpus, "--lengths", 64, "--max-documents", 2, "--protocol", "tail", "--targets", 8]
    assert warning not in ropecli("eval-ppl", folder, *few).err
    assert ropecli("compare", folder, "--methods", "none,ntk", "--factors", 2, *few).err.count(warning) == 1


def test_tuned_constants_are_reverted_and_tuned_again(tuned, ropecli, arguments, llama, tmp_path, config_of):
    folder, _ = tuned("search")
    ropecli("revert", folder, "-o", tmp_path / "back").succeeds()
    assert names(tmp_path / "back") == names(llama)
    assert config_of(tmp_path / "back") == config_of(llama)
    again, fresh = tmp_path / "again", tuned("grid")[0]
    ropecli(*arguments(again, "--level", "grid", checkpoint=folder)).succeeds()
    assert "factors.json" not in names(again)
    assert [read_report(again)[key] for key in ("base", "score")] == [
        read_report(fresh)[key] for key in ("base", "score")
    ]


def test_heads_that_cannot_be_folded_are_refused_before_the_search(ropecli, arguments, build, tmp_path):
    refused = ropecli(*arguments(tmp_path / "out", checkpoint=build("gpt_neox_japanese")))
    refused.is_refused("does not support --level heads", "its own attention code", "--level grid")
    assert "documents of" not in refused.err
    half = ropecli(*arguments(tmp_path / "out", "--level", "heads", "--dtype", "bfloat16"))
    half.is_refused("The weight files do not contain", "in bfloat16", "Set --dtype")
    assert names(tmp_path) == []
    ropecli(*arguments(tmp_path / "out", "--level", "grid", "--dtype", "bfloat16")).succeeds()


# Stopped runs.


def test_an_interrupted_search_resumes(tuned, ropecli, arguments, stopping, tmp_path):
    run = arguments(tmp_path / "out", *LEVELS["search"])
    with stopping(9):
        outcome = ropecli(*run)
    assert outcome.code == 130
    assert "Run the same command with --resume to continue" in outcome.said
    assert names(tmp_path) == ["out.state"]
    ropecli(*run).is_refused("was interrupted", "--resume")
    ropecli(*run, "--resume", "--short-weight", 1).is_refused("short_weight: 0.25 then, 1.0 now")
    ropecli(*run, "--resume").succeeds()
    assert names(tmp_path) == ["out"]
    whole, _ = tuned("search")
    assert without_times(read_report(tmp_path / "out")) == without_times(read_report(whole))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_a_run_that_was_terminated_and_killed_resumes_to_the_same_weights(
    ropecli, start_ropecli, arguments, stopping, tmp_path
):
    """Terminated in the grid, then killed in the training: the result is that of an uninterrupted run, to the bit."""
    output, whole, long = tmp_path / "out", tmp_path / "whole", ["--steps", 20, "--points", 1]
    ropecli(*arguments(whole, *long)).succeeds()
    with stopping(9, signal.SIGTERM):
        outcome = ropecli(*arguments(output, *long))
    assert outcome.code == 143
    assert "Run the same command with --resume to continue" in outcome.said
    process = start_ropecli(arguments(output, *long, "--resume"))
    while process.poll() is None and not (tmp_path / "out.state" / "learned" / "000010").exists():
        time.sleep(0.01)
    assert process.poll() is None, f"ended too soon: {process.communicate()}"
    process.kill()
    process.wait()
    assert not output.exists()
    with (tmp_path / "out.state" / "samples-0.jsonl").open("ab") as file:
        file.write(b'{"part": "heads 4')  # cut short within a line
    ropecli(*arguments(output, *long, "--resume")).succeeds()
    assert (output / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert without_times(read_report(output)) == without_times(read_report(whole))
    assert names(tmp_path) == ["out", "whole"]
