"""One reading of a checkpoint: every command takes its lengths from the same place."""

import dataclasses
import json

import pytest

from ropecli.checkpoint import files, state
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.engines.engine_export import export_checkpoint
from ropecli.scaling.spec import make_spec

DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, **BANDS}}
# max_position_embeddings is 64 in each
LENGTHS = {
    "unscaled": ({}, 64),
    "dynamic, whose pretraining length is max_position_embeddings": (DYNAMIC, 256),
    "yarn, added as Qwen's cards say, with max_position_embeddings left": (YARN, 256),
    "llama3, whose factor is not a ratio of lengths (Llama 3.2)": (LLAMA3, 64),
    "patched to another length than pretraining length × factor": (None, 256),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_every_command_reads_the_same_context_length(case, llama, edited, ropecli, corpus, tmp_path):
    scaling, length = LENGTHS[case]
    if scaling is None:
        folder = tmp_path / "patched"
        ropecli("patch", llama, "--method", "yarn", "--factor", 8, "--target-length", 256, "-o", folder)
    else:
        folder = edited(llama, rope_parameters=..., rope_theta=1e4, **scaling)
    for command in ("inspect", "theory"):
        assert json.loads(ropecli(command, folder, "--json").out)["target_length"] == length
    assert f"--max-model-len {length}" in ropecli("export", folder, "--engine", "vllm").out
    outcome = ropecli("finetune", folder, "--data", corpus, "-o", tmp_path / "out", "--dry-run")
    assert f"sequences of {length} tokens" in outcome.out, outcome.err


def test_the_files_are_read_once_per_checkpoint(llama, ropecli, tmp_path, monkeypatch):
    folder, parsed = tmp_path / "patched", []
    ropecli("patch", llama, "--method", "yarn", "--factor", 4, "-o", folder)
    read_own_yaml = files.read_own_yaml
    monkeypatch.setattr(files, "read_own_yaml", lambda text: parsed.append(text) or read_own_yaml(text))
    checkpoint = open_checkpoint(folder)
    read = state.read_state(checkpoint)
    make_plan(checkpoint, make_spec("ntk", 2.0))
    export_checkpoint(checkpoint, "vllm")
    assert state.read_state(checkpoint) is read
    assert len(parsed) == 1
    unpatched = dataclasses.replace(checkpoint, config=read.note.original)
    assert state.read_state(unpatched).positions.context_length == 64
