"""Two processes do what one does with twice the gradient accumulation."""

import subprocess
import sys

import numpy as np
import pytest

KEYS = {"steps": 4, "batch_size": 1, "learning_rate": 5e-4, "save_every": 3}


@pytest.fixture(scope="module")
def torchrun():
    def run(arguments):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        return subprocess.run([*launcher, "-m", "ropecli", *arguments], capture_output=True, text=True)

    return run


def test_two_processes_equal_one(torchrun, command_line, patched_llama, tmp_path, tune, metrics):
    from safetensors.torch import load_file

    done = torchrun(command_line(patched_llama, tmp_path / "two", **KEYS, gradient_accumulation=2))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 steps") == 1  # the first process speaks for both
    one = tune(patched_llama, tmp_path / "one", **KEYS, gradient_accumulation=4)
    assert "processes: 2" in (tmp_path / "two" / "run.yaml").read_text()
    losses = [[line["loss"] for line in metrics(folder)] for folder in (tmp_path / "two", one)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-5 * 7)
    weights = [load_file(folder / "model.safetensors") for folder in (tmp_path / "two", one)]
    before = load_file(patched_llama / "model.safetensors")
    for name, value in weights[0].items():
        moved = np.linalg.norm(weights[1][name] - before[name])
        assert np.linalg.norm(value - weights[1][name]) < 0.02 * moved
    assert {path.name for path in one.iterdir()} == {path.name for path in (tmp_path / "two").iterdir()}
