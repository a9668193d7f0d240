"""A finished run is a checkpoint: stock transformers loads it, and ropecli continues from it."""

import shutil

import pytest
import torch
from safetensors import safe_open


@pytest.fixture(scope="module")
def source(build, tmp_path_factory):
    """A bfloat16 Llama with tied embeddings, patched with yarn ×2, and with files beside the weights."""
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import make_spec

    folder = build("llama", head_dim=32, tie_word_embeddings=True, dtype="bfloat16")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").write_text("a notice")
    (folder / "notes.bin").write_bytes(b"not part of a checkpoint")
    output = tmp_path_factory.mktemp("patched") / "tied"
    patch_to(make_plan(open_checkpoint(folder), make_spec("yarn", 2.0)), output)
    for name in ("extend.json", "extend.html"):  # as of a run of `extend` that wrote it
        (output / name).write_text("{}")
    return output


@pytest.fixture(scope="module")
def run(source, tune_into, tmp_path_factory):
    return tune_into(source, tmp_path_factory.mktemp("finished") / "run")


def tensors(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def test_files_names_and_dtypes_are_those_of_the_source(source, run):
    expected = {path.name for path in source.iterdir()} - {"extend.json", "extend.html"} | {"run.yaml", "metrics.jsonl"}
    assert {path.name for path in run.iterdir()} == expected
    before, after = tensors(source), tensors(run)
    assert "lm_head.weight" not in before  # the embeddings are tied
    shapes = [{key: (tensor.shape, tensor.dtype) for key, tensor in state.items()} for state in (before, after)]
    assert shapes[0] == shapes[1]
    assert not all(torch.equal(after[key], before[key]) for key in before)
    assert (run / "README.md").read_text() == "a notice"


def test_stock_transformers_loads_the_result(run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(run, output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.rope_parameters["rope_type"] == "yarn"
    assert AutoTokenizer.from_pretrained(run)("ba de")["input_ids"]


def test_several_weight_files_become_one(source, tune, tmp_path):
    from transformers import AutoModelForCausalLM

    sharded = shutil.copytree(source, tmp_path / "sharded")
    (sharded / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(sharded, max_shard_size="60KB")
    shutil.copy(source / "config.json", sharded)
    assert len(list(sharded.glob("*.safetensors"))) > 1
    run = tune(sharded)
    # a shard of the source left in its place would be loaded in that of the trained weights
    assert [path.name for path in run.glob("*.safetensors*")] == ["model.safetensors"]
    assert AutoModelForCausalLM.from_pretrained(run, output_loading_info=True)[1]["missing_keys"] == set()


def test_tensors_that_transformers_fuses_keep_their_dtype(build, tune):
    """Mixtral's experts have other names in the live model than on disk."""
    from transformers import AutoModelForCausalLM

    folder = build("mixtral", head_dim=32, num_local_experts=2, dtype="bfloat16")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    before, after = tensors(folder), tensors(tune(folder, steps=1))
    assert after.keys() == before.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
