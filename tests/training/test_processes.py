"""Two CPU processes do what one does, and resume where they were stopped: DDP and FSDP2, also with parts of a sequence.

run_fsdp2.py says how FSDP2 runs there.
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

slow = pytest.mark.slow
KEYS = {"steps": 6, "batch_size": 1, "gradient_accumulation": 2, "learning_rate": 5e-4, "save_every": 3}
SHARED = {**KEYS, "batch_size": 2, "gradient_checkpointing": True, "context_parallel_size": 2}
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture
def ddp(start_ropecli):
    """ddp(arguments) -> two processes of the command line, with their output kept."""
    return lambda arguments: start_ropecli(arguments, processes=2)


def fsdp2(arguments):
    """The same under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    return subprocess.Popen([*launcher, Path(__file__).with_name("run_fsdp2.py"), *arguments], **PIPES)


@pytest.fixture
def run_two(command_line, tmp_path):
    """run_two(start, checkpoint, key=value, ...) -> the folder of the finished run."""

    def run(start, checkpoint, **keys) -> Path:
        process = start(command_line(checkpoint, tmp_path / "two", **keys))
        _, err = process.communicate()
        assert process.returncode == 0, err[-4000:]
        return tmp_path / "two"

    return run


@pytest.fixture
def assert_same(metrics):
    """assert_same(checkpoint, run, run): losses, norms, perplexities, and how far the weights moved."""

    def tensors_of(folder: Path):
        return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}

    def check(checkpoint: Path, two: Path, one: Path, within=0.002) -> None:
        for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):
            steps = [[(line["step"], line[key]) for line in metrics(run) if key in line] for run in (two, one)]
            assert steps[0]
            np.testing.assert_allclose(*steps, rtol=tolerance)
        measured = [[list(line["ppl"].values()) for line in metrics(run) if "ppl" in line] for run in (two, one)]
        np.testing.assert_allclose(*measured, rtol=1e-4)
        before, *states = [tensors_of(folder) for folder in (checkpoint, two, one)]
        assert before.keys() == states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            # as a whole: where a gradient all but vanishes, AdamW makes a step of its rounding
            moved = np.linalg.norm(states[1][name] - before[name])
            assert np.linalg.norm(value - states[1][name]) <= within * moved

    return check


PACKED_LONGCE = {"loss": "longce", "longce_cap": 2, "length": 96, "sequences": "packed", "end_token": "<s>"}
LOSSES = {
    "next-token": {},
    "longce": {"loss": "longce", "length": 96},
    "longce, packed": PACKED_LONGCE,
    "by document": {"loss_weighting": "documents"},
}


@pytest.mark.parametrize(
    "loss", [pytest.param(keys, marks=[slow] if keys else [], id=name) for name, keys in LOSSES.items()]
)
def test_data_parallel_run_stopped_and_resumed_equals_one_process(
    ddp, stop_and_resume, patched_llama, corpus, text_and_chat, tune, metrics, tmp_path, assert_same, loss
):
    mixture = {} if "loss" in loss else {"mixture": text_and_chat}
    measured = {"eval_data": str(corpus), "eval_every": 5, "eval_documents": 4}
    keys = {**KEYS, "steps": 8, **mixture, **loss, **measured}
    two = stop_and_resume(ddp, **keys)
    one = tune(patched_llama, tmp_path / "one", **{**keys, "gradient_accumulation": 4})
    assert "processes: 2" in (two / "run.yaml").read_text()
    assert sum("ppl" in line for line in metrics(two)) == 3  # before the first step, after 5 and after 8
    assert_same(patched_llama, two, one, within=0.02)
    assert {path.name for path in one.iterdir()} == {path.name for path in two.iterdir()}


@slow
@pytest.mark.parametrize(
    "kind", ["whole", "longce", "tied, in several files", "experts that transformers merges", "adapter", "multimodal"]
)
def test_fsdp2_equals_one_process(run_two, patched_llama, build, tune, assert_same, kind):
    from transformers import AutoModelForCausalLM

    others = {
        "longce": PACKED_LONGCE,
        "adapter": {"adapter": "lora-plus"},
    }
    keys = {**KEYS, **others.get(kind, {})}
    folder = patched_llama
    if kind.startswith("tied"):
        folder = build("gemma2", head_dim=32, tie_word_embeddings=True)
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="100KB")
    if kind.startswith("experts"):
        folder = build("mixtral", head_dim=32, num_local_experts=2)
    if kind == "multimodal":  # its vision part is frozen
        folder = build("qwen2_vl")
    two = run_two(fsdp2, folder, **keys)
    assert_same(folder, two, tune(folder, **{**keys, "gradient_accumulation": 4}))
    if kind.startswith("tied"):
        assert {file.name for file in folder.glob("*.safetensors*")} == {file.name for file in two.glob("*.safe*")}
        assert AutoModelForCausalLM.from_pretrained(two, output_loading_info=True)[1]["missing_keys"] == set()


@slow
def test_stopped_fsdp2_run_resumes_to_the_same_bits(run_two, patched_llama, stop_and_resume, metrics, weights_of):
    whole, run = run_two(fsdp2, patched_llama, **KEYS), stop_and_resume(fsdp2, **KEYS)
    assert weights_of(run) == weights_of(whole)
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(whole)]


@slow
@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("ddp", "packed"),
        ("ddp", "windows"),
        ("ddp", "chat"),
        ("fsdp2", "measured"),
        ("fsdp2", "adapter"),
        ("fsdp2", "pose"),
    ],
)
def test_processes_that_share_each_sequence_equal_one(
    engine, kind, ddp, run_two, patched_llama, build, tune, assert_same, text_and_chat, corpus
):
    """A half of a conversation may have no token to train on."""
    text, chat = text_and_chat
    mixture = [{**text, "sequences": "concat", "end_token": "<s>"}, {**chat, "sequences": "single"}]
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20}
    keys = {
        "pose": {"positions": "pose"},
        "chat": {"mixture": mixture, "loss_weighting": "documents"},
        "packed": {"sequences": "packed", "end_token": "<s>"},
        "windows": {"sequences": "packed", "end_token": "<s>"},
        "adapter": {"adapter": "lora-plus"},
        "measured": {"eval_data": str(corpus), "eval_every": 3, "eval_lengths": [48, 96], "eval_documents": 3},
    }[kind]
    folder = patched_llama
    if kind == "windows":
        folder = build("gemma3_text", head_dim=32, **windows)
    two = run_two({"ddp": ddp, "fsdp2": fsdp2}[engine], folder, **SHARED, **keys)
    assert_same(folder, two, tune(folder, **{**SHARED, "context_parallel_size": 1, **keys}))
