"""`ropecli tune`: every level from the command line to a folder that stock transformers loads; what is refused; what is
kept of a run that was stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml

FEW = ["--points", 3, "--steps", 4, "--batch-size", 2, "--max-documents", 10, "--targets", 16]
SMALL_SEARCH = ["--level", "search", "--population", 4, "--iterations", 1]
TIMES = ("seconds", "command")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two threads on two cores that others use take longer than one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def arguments(llama, corpus):
    def make(output, *options, checkpoint=llama, data=corpus, factor=2):
        fixed = ["tune", checkpoint, "--data", data, "--factor", factor, "--device", "cpu", *FEW]
        return [*map(str, [*fixed, "--output", output, *options])]

    return make


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, llama, corpus, one_thread):
    """tuned(level) -> the folder that a level gave, and what the command printed; made once."""
    from typer.testing import CliRunner

    from ropecli.cli.app import app

    found = {}

    def make(level):
        if level not in found:
            output = tmp_path_factory.mktemp(level) / "out"
            search = SMALL_SEARCH[2:] if level == "search" else []
            fixed = ["tune", llama, "--data", corpus, "--factor", 2, "--level", level, "--device", "cpu", *FEW, *search]
            result = CliRunner().invoke(app, [*map(str, [*fixed, "--output", output])], env={"COLUMNS": "200"})
            assert result.exit_code == 0, result.output
            found[level] = output, (result.stdout, result.stderr)
        return found[level]

    return make


def started(arguments):
    command = [sys.executable, "-m", "ropecli", *arguments]
    one = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=one)


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(one) for key, one in value.items() if key not in TIMES}
    return [without_times(one) for one in value] if isinstance(value, list) else value


def read_report(folder):
    return json.loads((folder / "tune.json").read_text())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def refused(outcome, *expected):
    """One message, and nothing but it."""
    assert (outcome.code, outcome.out) == (2, "")
    message = " ".join(outcome.err.split())
    for text in expected:
        assert text in message
    assert sum(line.startswith("error:") for line in outcome.err.splitlines()) == 1
    assert "Traceback" not in message


def logits(folder, scaling=None):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(1, 101)[None]
    with torch.inference_mode():
        return model(ids).logits


LEVELS = ["grid", "heads", "search"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_from_end_to_end(tuned, llama, level):
    folder, (out, err) = tuned(level)
    report = read_report(folder)
    method = "longrope" if level == "search" else "yarn"
    assert (report["level"], report["method"], report["factor"], report["target_length"]) == (level, method, 2.0, 128)
    assert report["seconds"] == pytest.approx(sum(point["seconds"] for point in report["points"]))
    record = yaml.safe_load((folder / "ropecli.yaml").read_text())
    assert record["scaling"]["method"] == method
    assert record["tuned"]["level"] == level
    assert record["tuned"]["weights_changed"] == (report["step"] > 0)
    assert json.loads((folder / "config.json").read_text())["rope_parameters"]["rope_type"] == method
    expected = {path.name for path in llama.iterdir()} | {"ropecli.yaml", "tune.json"}
    assert set(names(folder)) == expected | ({"factors.json"} if level == "search" else set())
    assert names(folder.parent) == ["out"]
    assert f"{llama} → {folder}: {method} ×2, 128 tokens" in out
    assert "Proved: in stock transformers, 1 rotary table matches" in out
    assert f"ropecli eval-ppl {folder} --baseline {llama}" in out
    assert "Traceback" not in err


def test_the_factors_of_a_search_are_a_file_for_longrope(tuned, ropecli, llama, tmp_path):
    folder, _ = tuned("search")
    options = ["--method", "longrope", "--factor", 2, "--factors-file", folder / "factors.json"]
    assert ropecli("patch", llama, *options, "--output", tmp_path / "out").code == 0
    configs = [json.loads((one / "config.json").read_text()) for one in (folder, tmp_path / "out")]
    assert configs[0] == configs[1]
    assert torch.equal(logits(folder), logits(tmp_path / "out"))


def test_an_interrupted_search_on_needles_resumes(ropecli, llama, tmp_path, stopping):
    fixed = ["tune", llama, "--data", "demo-train", "--factor", 2, "--device", "cpu", "--max-documents", 10]
    arguments = [*map(str, [*fixed, *SMALL_SEARCH, "--objective", "needle", "--output", tmp_path / "out"])]
    with stopping(9):
        assert ropecli(*arguments).code == 130
    outcome = ropecli(*arguments, "--resume")
    assert outcome.code == 0, outcome.err
    assert "scores of keys hidden in 2 calibration documents" in " ".join(outcome.out.split())
    report = read_report(tmp_path / "out")
    assert report["settings"]["objective"] == "needle"
    assert report["score"]["objective"] <= report["untuned"]["objective"] + 1e-9
    assert json.loads((tmp_path / "out" / "factors.json").read_text())["long_factor"][0] >= 1


def test_json_is_the_report(ropecli, arguments, tmp_path):
    outcome = ropecli(*arguments(tmp_path / "out", "--level", "grid", "--methods", "ntk,yarn", "--json"))
    report = json.loads(outcome.out)
    assert report == read_report(tmp_path / "out")
    assert {point["method"] for point in report["points"]} == {"ntk", "yarn"}
    assert report["settings"]["methods"] == ["ntk", "yarn"]
    assert report["command"][:2] == ["ropecli", "tune"]


# What was written, and the other commands.


def test_tuned_weights_are_not_reverted_and_not_tuned_again(tuned, ropecli, arguments, llama, tmp_path):
    folder, _ = tuned("heads")
    refused(ropecli("patch", folder, "--revert", "-o", tmp_path / "out"), "changed the weights", str(llama))
    refused(ropecli(*arguments(tmp_path / "out", checkpoint=folder)), "is already tuned", str(llama))
    # nor by way of another patch
    patched = ropecli("patch", folder, "--method", "ntk", "--factor", 2, "-o", tmp_path / "patched")
    assert patched.code == 0
    refused(
        ropecli("patch", tmp_path / "patched", "--revert", "-o", tmp_path / "out"), "changed the weights", str(llama)
    )
    assert "tune.json" not in names(tmp_path / "patched")


def test_tuned_weights_under_another_scaling_are_warned_of(tuned, ropecli, corpus, llama, tmp_path):
    folder, _ = tuned("heads")
    report = read_report(folder)
    same = [option for key, value in report["params"].items() for option in ("--set", f"{key}={value}")]
    warned = f"were tuned for yarn ×2{' (' if same else ''}"
    for number, (options, expected) in enumerate(
        [
            (["--method", "yarn", "--factor", 2, *same], False),
            (["--method", "yarn", "--factor", 2, "--set", "beta_fast=9"], True),
            (["--method", "none"], True),
        ]
    ):
        outcome = ropecli("patch", folder, *options, "-o", tmp_path / f"{number}")
        assert outcome.code == 0
        assert (warned in outcome.err) == (str(llama) in outcome.err) == expected
    # whatever it was patched to since
    again = ropecli("patch", tmp_path / "2", "--method", "yarn", "--factor", 4, "-o", tmp_path / "again")
    assert warned in again.err
    few = ["--data", corpus, "--lengths", 64, "--max-documents", 2, "--protocol", "tail", "--targets", 8]
    assert warned not in ropecli("eval-ppl", folder, *few).err
    compared = ropecli("compare", folder, "--methods", "none,ntk", "--factors", 2, *few)
    assert compared.err.count(warned) == 1


def test_inspect_names_the_checkpoint_that_was_tuned(tuned, ropecli, llama):
    assert json.loads(ropecli("inspect", tuned("heads")[0], "--json").out)["tuned_from"] == str(llama)
    assert "weights tuned" in ropecli("inspect", tuned("heads")[0]).out
    for folder in (llama, tuned("grid")[0]):
        assert json.loads(ropecli("inspect", folder, "--json").out)["tuned_from"] is None
        assert "weights tuned" not in ropecli("inspect", folder).out


def test_tuned_constants_are_reverted_and_tuned_again(tuned, ropecli, arguments, llama, tmp_path):
    folder, _ = tuned("search")
    assert ropecli("patch", folder, "--revert", "-o", tmp_path / "back").code == 0
    assert names(tmp_path / "back") == names(llama)
    assert (tmp_path / "back" / "config.json").read_text() == (llama / "config.json").read_text()
    assert ropecli(*arguments(tmp_path / "again", "--level", "grid", checkpoint=folder)).code == 0
    assert ropecli(*arguments(tmp_path / "fresh", "--level", "grid")).code == 0
    assert "factors.json" not in names(tmp_path / "again")
    reports = [read_report(tmp_path / name) for name in ("again", "fresh")]
    assert [report["base"] for report in reports] == [reports[0]["base"]] * 2
    assert [report["score"] for report in reports] == [reports[0]["score"]] * 2


# What is refused.

WRONG = {
    "a level that is not known": (["--level", "head"], "--level is 'head'", "'heads'"),
    "a method of other distances": (["--methods", "yarn,rerope"], "rerope cannot be tuned"),
    "no method": (["--methods", ","], "--methods is empty"),
    "held-out text": (["--data", "demo"], "'demo' is the held-out text", "demo-train"),
    "a target that no document has": (["--factor", "400"], "25600 tokens", "Use a shorter length"),
    "too few documents": (["--max-documents", "3"], "documents of 128 tokens", "at least 4"),
}


@pytest.mark.parametrize(("options", "expected"), [(one[0], one[1:]) for one in WRONG.values()], ids=WRONG.keys())
def test_what_is_wrong_is_one_message(ropecli, arguments, tmp_path, options, expected):
    refused(ropecli(*arguments(tmp_path / "out", *options)), *expected)
    assert names(tmp_path) == []


def test_heads_that_cannot_be_folded_are_refused_before_the_search(ropecli, arguments, build, tmp_path):
    outcome = ropecli(*arguments(tmp_path / "out", checkpoint=build("gpt_neox_japanese")))
    refused(outcome, "does not support --level heads", "its own attention code", "--level grid")
    assert "documents of" not in outcome.err
    assert names(tmp_path) == []


# What is kept.


@pytest.fixture
def stopped(ropecli, arguments, stopping):
    """stopped(after, output, ...) -> a run that Ctrl-C ends after `after` documents."""

    def run(after, output, *options):
        with stopping(after):
            return ropecli(*arguments(output, *options))

    return run


@pytest.mark.parametrize(("level", "after"), [("heads", 13), ("search", 9)])
def test_an_interrupted_run_is_gone_on_with(tuned, ropecli, arguments, stopped, tmp_path, level, after):
    """Stopped in the training, in the search."""
    options = ["--level", level, *(SMALL_SEARCH[2:] if level == "search" else [])]
    outcome = stopped(after, tmp_path / "out", *options)
    assert outcome.code == 130
    assert "Run the same command with --resume to continue" in " ".join(outcome.err.split())
    assert names(tmp_path) == ["out.state"]
    refused(ropecli(*arguments(tmp_path / "out", *options)), "was interrupted", "--resume")
    other = ropecli(*arguments(tmp_path / "out", *options, "--resume", "--short-weight", 1))
    refused(other, "short_weight: 0.25 then, 1.0 now")
    assert ropecli(*arguments(tmp_path / "out", *options, "--resume")).code == 0
    assert names(tmp_path) == ["out"]
    whole, _ = tuned(level)
    assert without_times(read_report(tmp_path / "out")) == without_times(read_report(whole))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_weights_that_half_precision_would_round_are_refused(ropecli, arguments, tmp_path):
    outcome = ropecli(*arguments(tmp_path / "out", "--level", "heads", "--dtype", "bfloat16"))
    refused(outcome, "The weight files do not contain", "in bfloat16", "Set --dtype")
    assert names(tmp_path) == []
    assert ropecli(*arguments(tmp_path / "out", "--level", "grid", "--dtype", "bfloat16")).code == 0


def test_sigterm_is_obeyed_and_killed_runs_go_on_to_the_same_weights(ropecli, arguments, stopping, tmp_path):
    """Terminated in the grid, then killed in the training: the result is that of an uninterrupted run, to the bit."""
    long = ["--steps", 20, "--points", 1]
    assert ropecli(*arguments(tmp_path / "whole", *long)).code == 0
    output = tmp_path / "out"
    with stopping(9, signal.SIGTERM):
        outcome = ropecli(*arguments(output, *long))
    assert outcome.code == 143
    assert "Run the same command with --resume to continue" in " ".join(outcome.err.split())
    process = started(arguments(output, *long, "--resume"))
    while process.poll() is None and not (tmp_path / "out.state" / "learned" / "000010").exists():
        time.sleep(0.01)
    assert process.poll() is None, f"ended too soon: {process.stderr.read()}"
    process.kill()
    process.communicate()
    assert not output.exists()
    # cut short within a line
    with (tmp_path / "out.state" / "samples-0.jsonl").open("ab") as file:
        file.write(b'{"part": "heads 4')
    assert ropecli(*arguments(output, *long, "--resume")).code == 0
    assert (output / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert without_times(read_report(output)) == without_times(read_report(tmp_path / "whole"))
    assert names(tmp_path) == ["out", "whole"]
