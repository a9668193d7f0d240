"""`ropecli eval-ppl --output`: stopped at any moment, by hand or by SIGKILL, --resume gives the uninterrupted report.

Two processes give the very numbers of one.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SLIDING = ["--protocol", "sliding", "--stride", "2", "--max-tokens", "120", "--lengths", "24,64"]
PREFIX = ["--lengths", "24,64,128"]
TIMES = ("seconds", "tokens_per_second", "peak_memory")


@pytest.fixture
def arguments(llama, corpus):
    def make(*options, checkpoint=llama, how=PREFIX):
        return ["eval-ppl", str(checkpoint), "--data", str(corpus), "--device", "cpu", *how, *map(str, options)]

    return make


def without_times(report):
    """What was measured, but for how it went and by which command."""
    if isinstance(report, dict):
        report = {key: without_times(value) for key, value in report.items() if key not in (*TIMES, "command")}
    elif isinstance(report, list):
        report = [without_times(value) for value in report]
    return report


def read(path):
    return without_times(json.loads(path.read_text()))


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
        (["--method", "none", "--original-length", 32], "jobs.0.scaling: "),
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
    ropecli(*arguments("--output", output, "--resume", checkpoint=folder)).is_refused("checkpoint: 'sha256:")


def test_a_killed_run_resumes(ropecli, arguments, tmp_path):
    output, whole = tmp_path / "report.json", tmp_path / "whole.json"
    command = arguments("--output", output, how=SLIDING)
    process = subprocess.Popen([sys.executable, "-m", "ropecli", *command], stderr=subprocess.PIPE, text=True)
    progress = tmp_path / "report.json.state" / "samples-0.jsonl"
    while process.poll() is None:
        if progress.exists() and len(progress.read_bytes().splitlines()) > 3:
            break
        time.sleep(0.002)
    else:
        pytest.fail(f"ended too soon: {process.stderr.read()}")
    # a run in use is left to its user
    ropecli(*command).is_refused("or is still running")
    in_use = ropecli(*command, "--resume")
    assert process.poll() is None, "it was done too soon for this test"
    in_use.is_refused("in use by another run")
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert 3 < len(progress.read_bytes().splitlines()) < 13
    ropecli(*command, "--resume").succeeds()
    ropecli(*arguments("--output", whole, how=SLIDING)).succeeds()
    assert read(output) == read(whole)
    assert names(tmp_path) == ["report.json", "whole.json"]


def test_two_processes_give_the_very_numbers_of_one(ropecli, arguments, stopped, llama, tmp_path):
    """On CPUs by the default --device too; they resume where one was stopped. The first alone speaks."""
    options = ["--baseline", llama, "--method", "linear", "--factor", 4, "--json"]
    output = tmp_path / "report.json"
    stopped(5, *options, "--output", output)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ropecli"]
    command = arguments(*options, "--output", output, "--resume")
    command[command.index("--device") + 1] = "auto"
    # the launcher would give each process one thread, and sums in another order
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *launcher, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout)["reports"]  # of one process, or it would be no JSON
    assert reports == json.loads(output.read_text())["reports"]
    assert done.stderr.count("tokenizer has") == 1  # a warning for the model, not for each process
    alone = ropecli(*arguments(*options)).reports()
    for report in alone:
        assert report["settings"]["processes"] == 1
        report["settings"]["processes"] = 2
    assert without_times(reports) == without_times(alone)
    assert names(tmp_path) == ["report.json"]
