"""One reading of a checkpoint: every command takes its lengths from the same place."""

import json

import pytest

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
    for command, key in (("inspect", "context_length"), ("theory", "target_length")):
        assert json.loads(ropecli(command, folder, "--json").out)[key] == length
    assert f"--max-model-len {length}" in ropecli("export", folder, "--engine", "vllm").out
    outcome = ropecli("finetune", folder, "--data", corpus, "-o", tmp_path / "out", "--dry-run")
    assert f"sequences of {length} tokens" in outcome.out, outcome.err
