"""FSDP2 on two CPU processes does what one process does, and resumes where it was stopped; run_fsdp2.py says how."""

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
def run_two(start, command_line, tmp_path_factory):
    """run_two(checkpoint, key=value, ...) -> the folder of a whole run on two processes."""

    def run(checkpoint, **keys) -> Path:
        output = tmp_path_factory.mktemp("two") / "run"
        process = start(command_line(checkpoint, output, **{**KEYS, **keys}))
        _, err = process.communicate()
        assert process.returncode == 0, err
        return output

    return run


@pytest.fixture(scope="module")
def two(run_two, patched_llama) -> Path:
    return run_two(patched_llama)


@pytest.fixture
def assert_equal(metrics):
    """assert_equal(checkpoint, run, run): losses, norms, and how far the weights moved."""

    def check(checkpoint: Path, two: Path, one: Path) -> None:
        losses, norms = [
            [[line[key] for line in metrics(folder)] for folder in (two, one)] for key in ("loss", "grad_norm")
        ]
        np.testing.assert_allclose(*losses, rtol=0, atol=1e-5)
        np.testing.assert_allclose(*norms, rtol=1e-4)
        before, *states = [tensors_of(folder) for folder in (checkpoint, two, one)]
        assert before.keys() == states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            moved = np.linalg.norm(states[1][name] - before[name])
            assert np.linalg.norm(value - states[1][name]) <= 0.002 * moved

    return check


def tensors_of(folder: Path):
    from safetensors.torch import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_split_weights_equal_whole_ones(two, patched_llama, tune, assert_equal):
    assert_equal(patched_llama, two, tune(patched_llama, **{**KEYS, "gradient_accumulation": 4}))


def test_a_tied_checkpoint_in_several_files_keeps_them(run_two, build, tune, tmp_path, assert_equal):
    from transformers import AutoModelForCausalLM

    folder = build("gemma2", head_dim=32, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    two = run_two(folder)
    assert_equal(folder, two, tune(folder, **{**KEYS, "gradient_accumulation": 4}))
    assert {path.name for path in two.glob("*.safetensors*")} == {path.name for path in folder.glob("*.safetensors*")}
    assert AutoModelForCausalLM.from_pretrained(two, output_loading_info=True)[1]["missing_keys"] == set()


def test_an_adapter_on_split_weights_equals_one_on_whole_weights(run_two, patched_llama, tune, assert_equal):
    keys = {"adapter": "lora-plus"}
    assert_equal(
        patched_llama,
        run_two(patched_llama, **keys),
        tune(patched_llama, **{**KEYS, **keys, "gradient_accumulation": 4}),
    )


def test_experts_that_transformers_merges_equal_whole_ones(run_two, build, tune, assert_equal):
    folder = build("mixtral", head_dim=32, num_local_experts=2)
    assert_equal(folder, run_two(folder), tune(folder, **{**KEYS, "gradient_accumulation": 4}))


def test_a_stopped_run_resumes_exactly(two, start, stop_and_resume, metrics, weights_of):
    run = stop_and_resume(start, **KEYS)
    assert weights_of(run) == weights_of(two)
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(two)]
