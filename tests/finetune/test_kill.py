"""SIGKILL at any moment: --resume gives the bits of an uninterrupted run."""

import os
import signal
import subprocess
import sys
import time

import pytest

# Runs the command line in forked children, the first killed before its first renaming or amid its first removal of
# a folder, the second at its second, and so on until one ends by itself. Forking spares importing torch for each.
KILLER = """
import os, pathlib, shutil, signal, sys
import accelerate, torch._dynamo, transformers.models.llama.modeling_llama
import ropecli.finetune.training
from transformers import AutoModelForCausalLM, AutoTokenizer
from ropecli.cli.app import main

count = 0

def die_at(moment, function, harms, before=lambda *arguments: None):
    def call(*arguments, **options):
        global count
        count += harms(arguments[0])
        if count == moment:
            before(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

def remove_a_part(folder, *arguments):
    files = [path for path in sorted(pathlib.Path(folder).rglob("*")) if path.is_file()]
    for path in files[:1]:
        path.unlink()

arguments, folder = sys.argv[1:], sys.argv[sys.argv.index("--output") + 1]
for moment in range(1, 200):
    child = os.fork()
    if not child:
        for name in ("rename", "replace"):
            setattr(pathlib.Path, name, die_at(moment, getattr(pathlib.Path, name), lambda path: True))
        shutil.rmtree = die_at(moment, shutil.rmtree, os.path.exists, remove_a_part)
        arguments[arguments.index("--output") + 1] = os.path.join(folder, str(moment))
        sys.argv = ["ropecli", *arguments]
        main()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
        break
"""


def faults_of_resuming(ropecli, arguments, run, uninterrupted, metrics, weights_of):
    """What a resumed run has not in common with an uninterrupted one; empty where all is well."""
    outcome = ropecli(*arguments, "--resume")
    if outcome.code:
        return [outcome.err]
    alike = {
        "weights": weights_of(run) == weights_of(uninterrupted),
        "steps": [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(uninterrupted)],
        "files": {path.name for path in run.iterdir()} == {path.name for path in uninterrupted.iterdir()},
    }
    return [name for name, same in alike.items() if not same]


def test_killed_before_any_renaming_or_amid_any_removal(
    ropecli, command_line, patched_llama, tmp_path, uninterrupted, metrics, weights_of
):
    arguments = command_line(patched_llama, tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLER, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runs = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    # run.yaml, three checkpoints, the weights, config.json; and what is removed between them
    assert len(runs) > 8
    assert weights_of(runs[-1]) == weights_of(uninterrupted)
    faults = {}
    for run in runs[:-1]:
        arguments = command_line(patched_llama, run)
        faults[run.name] = faults_of_resuming(ropecli, arguments, run, uninterrupted, metrics, weights_of)
    assert {moment: found for moment, found in faults.items() if found} == {}


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
SLOWER = {"steps": 80, "save_every": 20, "gradient_accumulation": 4}


@pytest.fixture(scope="module")
def long_run(patched_llama, tmp_path_factory, tune_into):
    return tune_into(patched_llama, tmp_path_factory.mktemp("runs") / "long", **SLOWER)


def test_killed_and_resumed_until_it_is_done(
    ropecli, command_line, patched_llama, tmp_path, long_run, metrics, weights_of
):
    run = tmp_path / "run"
    arguments = command_line(patched_llama, run, **SLOWER)
    for step in (2, 43):  # before the first checkpoint, and after the second
        process = started([*arguments, "--resume"])
        wait_for_step(process, run, step)
        if step == 43:  # a run in use is left to its user
            outcome = ropecli(*arguments, "--resume")
            assert outcome.code == 2
            assert "in use" in outcome.err
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert faults_of_resuming(ropecli, arguments, run, long_run, metrics, weights_of) == []


def test_an_interrupted_run_can_be_resumed(
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
    assert faults_of_resuming(ropecli, arguments, run, long_run, metrics, weights_of) == []
