"""Two processes do what one does with twice the gradient accumulation, and go on where they were stopped."""

import subprocess
import sys

import numpy as np
import pytest

KEYS = {"steps": 8, "batch_size": 1, "gradient_accumulation": 2, "learning_rate": 5e-4, "save_every": 3}


@pytest.fixture(scope="module")
def start():
    """start(arguments) -> the launcher of two processes of the command line, its output kept."""

    def launch(arguments):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        return subprocess.Popen(
            [*launcher, "-m", "ropecli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return launch


@pytest.fixture(scope="module")
def two(start, command_line, patched_llama, tmp_path_factory):
    """The folder of a whole run on two processes."""
    run = tmp_path_factory.mktemp("two") / "run"
    process = start(command_line(patched_llama, run, **KEYS))
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("8 steps") == 1  # the first process speaks for both
    assert "processes: 2" in (run / "run.yaml").read_text()
    return run


def test_two_processes_equal_one(two, patched_llama, tune, metrics):
    from safetensors.torch import load_file

    one = tune(patched_llama, **{**KEYS, "gradient_accumulation": 4})
    losses = [[line["loss"] for line in metrics(folder)] for folder in (two, one)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    norms = [[line["grad_norm"] for line in metrics(folder)] for folder in (two, one)]
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-4)
    weights = [load_file(folder / "model.safetensors") for folder in (two, one)]
    before = load_file(patched_llama / "model.safetensors")
    for name, value in weights[0].items():
        moved = np.linalg.norm(weights[1][name] - before[name])
        assert np.linalg.norm(value - weights[1][name]) < 0.02 * moved
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}


def test_two_processes_stopped_by_a_signal_go_on_as_if_they_had_not_been(
    two, start, stop_and_resume, metrics, weights_of
):
    run = stop_and_resume(start, **KEYS)
    assert weights_of(run) == weights_of(two)
    for line, expected in zip(metrics(run), metrics(two), strict=True):
        assert {**line, "tokens_per_second": 0} == {**expected, "tokens_per_second": 0}
