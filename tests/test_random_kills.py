"""Twenty SIGKILLs at random moments: --resume gives the very results of an uninterrupted run, and nothing is left."""

import json
import random
import shutil
import signal
import time

import forked
import pytest

KILLS = 20
TIMES = ("seconds", "tokens_per_second", "command")


def live(arguments):
    """The command line, which says when its work begins."""
    import ropecli.training.finetuning  # noqa: F401

    print("begun", flush=True)
    forked.ropecli(arguments)


COMMANDS = {
    "eval-ppl": ["eval-ppl", "--lengths", "24,64", "--protocol", "sliding", "--stride", "4", "--max-tokens", "120"],
    "ruler": ["ruler", "--tasks", "fwe,niah_single_1", "--mode", "rank", "--lengths", "1200,1300", "--samples", "8"],
    "finetune": ["finetune", "--steps", "25", "--length", "48", "--set", "tracker=none", "--set", "save_every=1"],
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
def test_killed_at_random_moments(llama, corpus, tmp_path, fork, name):
    """Should a process reach the end of its run before it is killed, the next one begins another run."""
    command, *options = COMMANDS[name]
    device = [] if name == "finetune" else ["--device", "cpu"]

    def begin(run):
        output = ["--output", tmp_path / run, "--resume"]
        process = fork(live, [command, llama, "--data", corpus, *device, *options, *output])
        while process.poll() is None and not process.outputs[0].read_text():
            time.sleep(0.005)
        return process

    def finish(run):
        process = begin(run)
        begun = time.monotonic()
        assert process.wait() == 0, process.communicate()
        return time.monotonic() - begun

    finish("first")  # the text is tokenised now
    span, killed, run, moments = 0.8 * finish("uninterrupted"), 0, 0, random.Random(0)
    while killed < KILLS:
        process = begin(str(run))
        time.sleep(moments.uniform(0, span))
        process.kill()
        code = process.wait()
        assert code in (0, -signal.SIGKILL), process.communicate()
        killed += code != 0
        if code == 0 or (name != "finetune" and (tmp_path / str(run)).exists()):  # killed when all was written
            for state in tmp_path.glob(f"{run}.*state"):
                shutil.rmtree(state)
            run += 1
    finish(str(run))
    runs = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert runs == [*sorted(map(str, range(len(runs) - 2))), "first", "uninterrupted"]
    expected = result(tmp_path / "uninterrupted")
    assert expected
    for run in runs:
        assert result(tmp_path / run) == expected, run
