"""Twenty SIGKILLs at random moments: --resume gives the very results of an uninterrupted run, and nothing is left."""

import json
import subprocess
import sys

import pytest

KILLS = 20
TIMES = ("seconds", "tokens_per_second", "peak_memory", "command")

# Lives of the command line in forked children, which spares importing torch for each. Should one reach the end of its
# run before it is killed, the next one begins another run.
LIVES = """
import os, pathlib, random, shutil, signal, sys, time
import accelerate, torch._dynamo, transformers.models.llama.modeling_llama
import ropecli.training.stages, ropecli.training.finetuning, ropecli.tuning.procedure
from ropecli.evaluation.tasks import key_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer
from ropecli.cli.app import main

def begin(name):
    child = os.fork()
    if not child:
        sys.argv = ["ropecli", *sys.argv[3:], "--output", str(folder / name), "--resume"]
        main()
        os._exit(0)
    return child

def end_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

key_tokens.MIN_GAIN, key_tokens.MAX_LOSS = 0.5, 8.0  # random weights have no loss below 2 nats
random.seed(0)
kills, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
assert end_of(begin("first")) == 0  # the text is tokenised now
begun = time.monotonic()
assert end_of(begin("uninterrupted")) == 0
span, killed, run = 0.8 * (time.monotonic() - begun), 0, 0
while killed < kills:
    child = begin(str(run))
    time.sleep(random.uniform(0, span))
    os.kill(child, signal.SIGKILL)
    code = end_of(child)
    assert code in (0, -signal.SIGKILL), code
    killed += code != 0
    if code == 0 or (sys.argv[3] != "finetune" and (folder / str(run)).exists()):  # killed when all was written
        for state in folder.glob(f"{run}.*state"):
            shutil.rmtree(state)
        run += 1
assert end_of(begin(str(run))) == 0
"""
SEARCH = ["--samples", "8", "--lengths", "280,330"]
COMMANDS = {
    "eval-ppl": ["eval-ppl", "--lengths", "24,64", "--protocol", "sliding", "--stride", "4", "--max-tokens", "120"],
    "longppl": ["eval-ppl", "--lengths", "64,128", "--protocol", "longppl"],  # most of it searches for key tokens
    "passkey": ["passkey", *SEARCH],
    "needle": ["needle", *SEARCH],
    "ruler": ["ruler", "--tasks", "fwe,niah_single_1", "--mode", "rank", "--lengths", "1200,1300", "--samples", "8"],
    "tune": ["tune", "--factor", "2", "--points", "3", "--steps", "30", "--batch-size", "2", "--targets", "16"],
    "finetune": [
        "finetune",
        "--set",
        "tracker=none",
        "--set",
        "steps=25",
        "--set",
        "save_every=1",
        "--set",
        "length=48",
    ],
}


def result(path):
    """What was measured and written, but for how long it took."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): content(file) for file in files}


def content(file):
    if file.suffix == ".jsonl":
        return [untimed(json.loads(line)) for line in file.read_text().splitlines()]
    try:
        return untimed(json.loads(file.read_bytes()))
    except ValueError:
        return file.read_bytes()


def untimed(value):
    if isinstance(value, dict):
        return {key: untimed(one) for key, one in value.items() if key not in TIMES}
    return [untimed(one) for one in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_random_moments(llama, corpus, tmp_path, name):
    command, *options = COMMANDS[name]
    data = [] if name == "passkey" else ["--data", corpus]
    device = [] if name == "finetune" else ["--device", "cpu"]
    evaluator = ["--evaluator", llama] if name == "longppl" else []
    arguments = [command, llama, *data, *device, *evaluator, *options]
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(KILLS), tmp_path, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    runs = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert runs == [*sorted(map(str, range(len(runs) - 2))), "first", "uninterrupted"]
    expected = result(tmp_path / "uninterrupted")
    assert expected
    for run in runs:
        assert result(tmp_path / run) == expected, run
