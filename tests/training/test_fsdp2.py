"""FSDP2 on two CPU processes does what one process does, and goes on where it was stopped; run_fsdp2.py says how."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow

RUNNER = Path(__file__).with_name("run_fsdp2.py")
KEYS = {"steps": 6, "batch_size": 1, "gradient_accumulation": 2, "learning_rate": 5e-4, "save_every": 3}


@pytest.fixture(scope="module")
def start():
    """start(arguments) -> two processes of the command line, their output kept."""

    def launch(arguments) -> subprocess.Popen:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        return subprocess.Popen(
            [*launcher, RUNNER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return launch


@pytest.fixture(scope="module")
def two(start, command_line, patched_llama, tmp_path_factory) -> Path:
    """The folder of a whole run on two processes."""
    run = tmp_path_factory.mktemp("two") / "run"
    process = start(command_line(patched_llama, run, **KEYS))
    _, err = process.communicate()
    assert process.returncode == 0, err
    return run


def test_split_weights_equal_whole_ones(two, patched_llama, tune, metrics):
    from safetensors.torch import load_file

    one = tune(patched_llama, **{**KEYS, "gradient_accumulation": 4})
    losses, norms = [
        [[line[key] for line in metrics(folder)] for folder in (two, one)] for key in ("loss", "grad_norm")
    ]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)
    np.testing.assert_allclose(*norms, rtol=1e-4)
    before, *states = [load_file(folder / "model.safetensors") for folder in (patched_llama, two, one)]
    assert before.keys() == states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        moved = np.linalg.norm(states[1][name] - before[name])
        assert np.linalg.norm(value - states[1][name]) < 0.002 * moved


def test_a_stopped_run_resumes_exactly(two, start, stop_and_resume, metrics, weights_of):
    run = stop_and_resume(start, **KEYS)
    assert weights_of(run) == weights_of(two)
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(two)]
