"""DeepSpeed: ZeRO and Ulysses on two CPU processes do what one process does, and resume where they were stopped.

The real command line, in an environment with DeepSpeed, which pytest's cache keeps.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

pytestmark = pytest.mark.slow

# what DeepSpeed needs besides, ropecli needs too, and is taken from this environment
PINNED = ["deepspeed==0.19.8", "einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "ninja==1.13.2", "py-cpuinfo==9.0.0"]
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "recipes" / "accelerate" / "8-gpu-ulysses.yaml"
KEYS = {
    "steps": 6,
    "batch_size": 2,
    "gradient_accumulation": 2,
    "learning_rate": 5e-4,
    "save_every": 3,
    "gradient_checkpointing": True,
}


@pytest.fixture(scope="module")
def python(environment) -> Path:
    return environment("deepspeed", PINNED, "--no-deps")


@pytest.fixture(scope="module")
def launch(python, tmp_path_factory):
    """launch(arguments, zero_stage=..., sp_size=...) -> two processes of the command line, started by Accelerate."""

    def start(arguments, zero_stage, sp_size) -> subprocess.Popen:
        config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        config["num_processes"] = 2
        config["deepspeed_config"]["zero_stage"] = zero_stage
        config["parallelism_config"]["parallelism_config_sp_size"] = sp_size
        config["parallelism_config"]["parallelism_config_dp_replicate_size"] = 2 // sp_size
        path = tmp_path_factory.mktemp("config") / "two.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)]),
            "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),  # DeepSpeed calls ninja
        }
        command = [python, "-m", "accelerate.commands.launch", "--config_file", path, "-m", "ropecli", *arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )

    return start


@pytest.fixture(scope="module")
def run_two(launch, command_line, tmp_path_factory):
    """run_two(checkpoint, zero_stage=..., sp_size=..., key=value, ...) -> the folder of the finished run."""

    def run(checkpoint, zero_stage, sp_size, **keys) -> Path:
        output = tmp_path_factory.mktemp("two") / "run"
        process = launch(command_line(checkpoint, output, **{**KEYS, **keys}), zero_stage, sp_size)
        _, err = process.communicate()
        assert process.returncode == 0, err[-4000:]
        return output

    return run


@pytest.fixture
def assert_equal(metrics, patched_llama):
    """assert_equal(run, run): losses and norms step by step, and the weights."""

    def check(two: Path, one: Path) -> None:
        from safetensors.torch import load_file

        steps = [[line for line in metrics(folder) if "loss" in line] for folder in (two, one)]
        assert len(steps[0]) == len(steps[1]) == KEYS["steps"]
        np.testing.assert_allclose(*[[line["loss"] for line in lines] for lines in steps], rtol=0, atol=1e-5)
        # AdamW's own steps hardly depend on how long the gradient is
        np.testing.assert_allclose(*[[line["grad_norm"] for line in lines] for lines in steps], rtol=1e-4)
        before, *states = [load_file(folder / "model.safetensors") for folder in (patched_llama, two, one)]
        assert before.keys() == states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            # as a whole: where a gradient all but vanishes, AdamW makes a step of its rounding
            moved = np.linalg.norm(states[1][name] - before[name])
            assert np.linalg.norm(value - states[1][name]) < 0.002 * moved

    return check


@pytest.mark.parametrize(("zero_stage", "kind"), [(1, "text"), (2, "chat"), (3, "text")])
def test_two_processes_that_share_each_sequence_equal_one(
    zero_stage, kind, run_two, patched_llama, tune, assert_equal, text_and_chat
):
    """A half of a conversation may have no token to train on."""
    mixture = [{**source, "sequences": "concat"} for source in text_and_chat]
    keys = {**KEYS, **({"mixture": mixture, "loss_weighting": "documents"} if kind == "chat" else {})}
    assert_equal(run_two(patched_llama, zero_stage, 2, **keys), tune(patched_llama, **keys))


def test_two_processes_with_split_weights_equal_one(run_two, patched_llama, tune, assert_equal):
    two = run_two(patched_llama, 3, 1)
    assert_equal(two, tune(patched_llama, **{**KEYS, "gradient_accumulation": 4}))


def test_evaluation_shares_sequences_too(run_two, patched_llama, tune, corpus, metrics):
    keys = {"eval_data": str(corpus), "eval_every": 3, "eval_lengths": [48, 96], "eval_documents": 3}
    two, one = run_two(patched_llama, 3, 2, **keys), tune(patched_llama, **{**KEYS, **keys})
    measured = [[line["ppl"] for line in metrics(folder) if "ppl" in line] for folder in (two, one)]
    assert len(measured[0]) == len(measured[1]) == 3  # before the first step, after 3 and after 6
    for lines in zip(*measured, strict=True):
        np.testing.assert_allclose(*[list(line.values()) for line in lines], rtol=1e-4)
        assert abs(lines[0]["48"] / lines[0]["96"] - 1) > 1e-3


def test_a_stopped_run_resumes_exactly(launch, run_two, patched_llama, stop_and_resume, assert_equal, metrics):
    whole = run_two(patched_llama, 3, 2)
    run = stop_and_resume(lambda arguments: launch(arguments, 3, 2), **KEYS)
    assert_equal(run, whole)
    assert len(metrics(run)) == KEYS["steps"]
