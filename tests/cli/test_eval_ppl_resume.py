"""`ropecli eval-ppl --output`: stopped at any moment, by hand or by SIGKILL, --resume gives the uninterrupted report.

Two processes give the very numbers of one.
"""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

SLIDING = ["--protocol", "sliding", "--stride", "8", "--max-tokens", "120", "--lengths", "24,64"]
PREFIX = ["--lengths", "24,64,128"]


@pytest.fixture
def arguments(llama, corpus):
    def make(*options, checkpoint=llama, how=PREFIX):
        return ["eval-ppl", str(checkpoint), "--data", str(corpus), "--device", "cpu", *how, *map(str, options)]

    return make


def without_command(report):
    """What was measured, but for the command."""
    if isinstance(report, dict):
        report = {key: without_command(value) for key, value in report.items() if key != "command"}
    elif isinstance(report, list):
        report = [without_command(value) for value in report]
    return report


def read(path):
    return without_command(json.loads(path.read_text()))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def stopped(ropecli, arguments, stopping):
    """stopped(after, ...) -> a run that Ctrl-C ends after `after` documents."""

    def run(after, *options, **others):
        with stopping(after):
            return ropecli(*arguments(*options, **others))

    return run


def test_progress_is_kept_and_another_request_is_refused_by_what_changed(ropecli, arguments, stopped, tmp_path):
    output = tmp_path / "report.json"
    stopped(3, "--output", output)
    before = (tmp_path / "report.json.state" / "samples-0.jsonl").read_bytes()
    ropecli(*arguments("--output", output)).is_refused("a run that was interrupted")
    for change, line in (
        (["--dtype", "bfloat16"], "dtype: 'float32' then, 'bfloat16' now"),
        (["--method", "linear", "--factor", 2], "jobs.0.scaling: "),
        (["--max-documents", 3], "jobs.0.tasks.0.documents: "),
    ):
        ropecli(*arguments("--output", output, "--resume", *change)).is_refused(line)
    assert (tmp_path / "report.json.state" / "samples-0.jsonl").read_bytes() == before


def test_other_weights_under_the_same_name_are_another_request(
    ropecli, arguments, stopped, large, changed_amid, tmp_path
):
    """They differ in one bit, in the middle of the file."""
    folder, output = Path(shutil.copytree(large, tmp_path / "checkpoint")), tmp_path / "report.json"
    stopped(2, "--output", output, checkpoint=folder)
    shutil.copyfile(changed_amid(folder) / "model.safetensors", folder / "model.safetensors")
    ropecli(*arguments("--output", output, "--resume", checkpoint=folder)).is_refused("weights: 'sha256:")


def test_a_killed_run_resumes(ropecli, start_ropecli, arguments, tmp_path):
    output, whole = tmp_path / "report.json", tmp_path / "whole.json"
    command = arguments("--output", output, how=SLIDING)
    process = start_ropecli(command)
    progress = tmp_path / "report.json.state" / "samples-0.jsonl"
    while process.poll() is None:
        if progress.exists() and len(progress.read_bytes().splitlines()) > 3:
            break
        time.sleep(0.002)
    else:
        pytest.fail(f"ended too soon: {process.communicate()}")
    process.send_signal(signal.SIGSTOP)  # or it would end while the others begin
    # a run in use is left to its user
    ropecli(*command).is_refused("or is still running")
    ropecli(*command, "--resume").is_refused("in use by another run")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 3 < len(progress.read_bytes().splitlines()) < 13
    ropecli(*command, "--resume").succeeds()
    ropecli(*arguments("--output", whole, how=SLIDING)).succeeds()
    assert read(output) == read(whole)
    assert names(tmp_path) == ["report.json", "whole.json"]


def test_two_processes_give_the_very_numbers_of_one(ropecli, start_ropecli, arguments, stopped, llama, tmp_path):
    """On CPUs by the default --device too; they resume where one was stopped. The first alone speaks."""
    options = ["--baseline", llama, "--method", "linear", "--factor", 4, "--json"]
    output = tmp_path / "report.json"
    stopped(5, *options, "--output", output)
    command = arguments(*options, "--output", output, "--resume")
    command[command.index("--device") + 1] = "auto"
    done = start_ropecli(command, processes=2, CUDA_VISIBLE_DEVICES="")
    out, err = done.communicate()
    assert done.returncode == 0, err
    reports = json.loads(out)["reports"]  # of one process, or it would be no JSON
    assert reports == json.loads(output.read_text())["reports"]
    assert err.count("tokenizer has") == 1  # a warning for the model, not for each process
    alone = ropecli(*arguments(*options)).reports()
    for report in alone:
        assert report["settings"]["processes"] == 1
        report["settings"]["processes"] = 2
    assert without_command(reports) == without_command(alone)
    assert names(tmp_path) == ["report.json"]
