"""Two processes, stopped by a signal and resumed, do what one does with twice the gradient accumulation."""

import subprocess
import sys

import numpy as np
import pytest
from safetensors.torch import load_file

KEYS = {"steps": 8, "batch_size": 1, "gradient_accumulation": 2, "learning_rate": 5e-4, "save_every": 3}


def start(arguments):
    """The launcher of two processes of the command line, its output kept."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.Popen(
        [*launcher, "-m", "ropecli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


OWN = {
    "next-token": {},
    "longce": {"loss": "longce", "length": 96},
    "by document": {"loss_weighting": "documents"},
}


@pytest.mark.parametrize(
    "own", [pytest.param(keys, marks=[pytest.mark.slow] if keys else [], id=name) for name, keys in OWN.items()]
)
def test_two_processes_stopped_and_resumed_equal_one(
    stop_and_resume, patched_llama, corpus, text_and_chat, tune, metrics, tmp_path, own
):
    """The documents that measure the run are shared by both as well."""
    mixture = {} if "loss" in own else {"mixture": text_and_chat}
    keys = {**KEYS, **mixture, **own, "eval_data": str(corpus), "eval_every": 4, "eval_documents": 4}
    two = stop_and_resume(start, **keys)
    one = tune(patched_llama, tmp_path / "one", **{**keys, "gradient_accumulation": 4})
    assert "processes: 2" in (two / "run.yaml").read_text()
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
        found = [[(line["step"], line[key]) for line in metrics(folder) if key in line] for folder in (two, one)]
        np.testing.assert_allclose(*found, rtol=tolerance)
    measured = [[line["ppl"] for line in metrics(folder) if "ppl" in line] for folder in (two, one)]
    assert len(measured[0]) == len(measured[1]) == 3  # before the first step, after 4 and after 8
    for lines in zip(*measured, strict=True):
        np.testing.assert_allclose(*[list(line.values()) for line in lines], rtol=1e-4)
    before, *weights = (load_file(folder / "model.safetensors") for folder in (patched_llama, two, one))
    for name, value in weights[0].items():
        moved = np.linalg.norm(weights[1][name] - before[name])
        assert np.linalg.norm(value - weights[1][name]) < 0.02 * moved
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}
