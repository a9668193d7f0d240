"""Ctrl-C, then SIGKILL: --resume gives the bits of an uninterrupted run. Random kills: test_random_kills.py."""

import os
import signal
import subprocess
import sys
import time

import pytest


# Runs the command line in forked children: that spares importing torch for each.
# The first child is killed before its first renaming or amid its first removal of a folder, the next at its fourth, and
# so on until one ends by itself.
def untimed(lines):
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]


def faults_of_resuming(ropecli, arguments, run, uninterrupted, metrics, weights_of):
    """What a resumed run has not in common with an uninterrupted one; empty where all is well."""
    outcome = ropecli(*arguments, "--resume")
    if outcome.code:
        return [outcome.err]
    alike = {
        "weights": weights_of(run) == weights_of(uninterrupted),
        "metrics": untimed(metrics(run)) == untimed(metrics(uninterrupted)),
        "files": {path.name for path in run.iterdir()} == {path.name for path in uninterrupted.iterdir()},
    }
    return [name for name, same in alike.items() if not same]


def started(arguments):
    command = [sys.executable, "-m", "ropecli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(process, run, step):
    """Until the log names the step. The processes below have far more steps before them than a poll takes."""
    while process.poll() is None:
        log = run / "metrics.jsonl"
        if log.exists() and len(log.read_bytes().splitlines()) >= step:
            return
        time.sleep(0.005)
    pytest.fail(f"ended too soon: {process.stderr.read()}")


# Long enough to be met on its way
SLOWER = {"steps": 30, "save_every": 10, "gradient_accumulation": 4}


@pytest.fixture(scope="module")
def long_run(patched_llama, tmp_path_factory, tune_into):
    return tune_into(patched_llama, tmp_path_factory.mktemp("runs") / "long", **SLOWER)


def test_stopped_by_ctrl_c_then_killed_and_resumed_until_it_is_done(
    ropecli, command_line, patched_llama, tmp_path, long_run, metrics, weights_of
):
    run = tmp_path / "run"
    arguments = command_line(patched_llama, run, **SLOWER)
    process = started(arguments)
    wait_for_step(process, run, 3)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "Saved after step" in errors
    (saved,) = (run / "checkpoints").iterdir()  # none was due yet
    assert int(saved.name[:6]) >= 3

    process = started([*arguments, "--resume"])
    wait_for_step(process, run, 12)
    process.send_signal(signal.SIGSTOP)  # or it would end while the other begins
    outcome = ropecli(*arguments, "--resume")  # a run in use is left to its user
    assert outcome.code == 2
    assert "in use" in outcome.err
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert faults_of_resuming(ropecli, arguments, run, long_run, metrics, weights_of) == []
