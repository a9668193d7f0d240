"""How a command ends that cannot finish: a signal, a process that is gone, or output that cannot be written."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
import torch

FULL = "/dev/full"
INSPECT = [sys.executable, "-m", "ropecli", "inspect", "demo"]


def killed():
    """Joins the processes of the launch, as a second `ropecli` would, and is killed."""
    torch.distributed.init_process_group("gloo")
    time.sleep(1)  # the other one has joined too
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def commands(llama, corpus, tmp_path):
    """By name: arguments of short runs on a CPU."""
    output = str(tmp_path / "out")
    data, cpu = ["--data", str(corpus)], ["--device", "cpu"]
    return {
        "eval-ppl": ["eval-ppl", str(llama), *data, *cpu, "--lengths", "24", "--output", output],
        "compare": ["compare", str(llama), *data, *cpu, "--lengths", "24", "--methods", "linear", "--output", output],
        "needle": ["needle", str(llama), *cpu, "--lengths", "256", "--samples", "2", "--output", output],
        "finetune": ["finetune", str(llama), *data, "--length", "32", "--output", output],
    }


def test_the_end_of_another_process_is_one_message(fork, start_ropecli, commands):
    first, other = ({**launch, "CUDA_VISIBLE_DEVICES": ""} for launch in forked.ranks(2))
    process = start_ropecli(commands["eval-ppl"], **first)
    fork(killed, **other)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert "error: Another process of this run exited" in err
    assert "Connection closed by peer" in err
    assert "--resume" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("name", "number"), [("eval-ppl", signal.SIGHUP), ("compare", signal.SIGTERM)])
def test_a_signal_ends_an_evaluation_as_ctrl_c_does(ropecli, commands, stopping, tmp_path, name, number):
    with stopping(3, number):
        outcome = ropecli(*commands[name])
    assert (outcome.code, outcome.out) == (128 + number, "")
    assert "Progress is saved next to" in outcome.err
    assert "--resume" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.state"]
    assert not list((tmp_path / "out.state").glob(".lock-*"))
    ropecli(*commands[name], "--resume").succeeds()


def test_a_signal_ends_a_command_without_output_quietly(ropecli, commands, stopping, tmp_path):
    with stopping(1, signal.SIGTERM):
        outcome = ropecli(*commands["needle"][:-2])
    assert (outcome.code, outcome.out) == (143, "")
    assert "Progress is saved" not in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_training_saves_when_its_terminal_is_closed(start_ropecli, commands, tmp_path):
    run = tmp_path / "out"
    arguments = [*commands["finetune"], "--set", "steps=200", "--set", "save_every=200"]
    terminal, its_end = os.openpty()
    process = start_ropecli(arguments, terminal=os.ttyname(its_end))
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes()):
        os.read(terminal, 4096)  # the progress bar
    os.close(its_end)
    os.close(terminal)
    assert process.wait() == 129
    assert [path.name for path in run.iterdir()].count(".lock") == 0
    assert len(list((run / "checkpoints").iterdir())) == 1


# Standard output that cannot be written.


@pytest.mark.skipif(not Path(FULL).exists(), reason=f"no {FULL} here")
@pytest.mark.parametrize(("more", "unbuffered"), [([], ""), (["--json"], "1")])
def test_a_full_disk_behind_the_output_is_one_message(more, unbuffered):
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path(FULL).open("w") as full:
        done = subprocess.run([*INSPECT, *more], stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == 2
    message = "[Errno 28] No space left on device"
    assert done.stderr in (f"error: {message}\n", f'{{"error": "{message}"}}\n')


@pytest.mark.parametrize("more", [["--json"], ["--help"]])
def test_a_reader_that_goes_ends_a_command_quietly(more):
    process = subprocess.Popen([*INSPECT, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 1
