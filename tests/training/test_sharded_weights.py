"""Each process reads its own part of the weights: that of a whole load. The result has the files of the source."""

import shutil
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropecli.attention import load_model
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.training.adapters import attach
from ropecli.training.launch import Launch
from ropecli.training.recipe_schema import Recipe
from ropecli.training.sharded_weights import build_unread, write_gathered


@contextmanager
def process(rank, count):
    """Be one of several processes; the others only exist for what does not communicate."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield distributed.device_mesh.init_device_mesh("cpu", (count,))
    finally:
        distributed.destroy_process_group()


def shard(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def in_several_files(folder, target):
    """The checkpoint in bfloat16, in several files."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(target, max_shard_size="60KB")
    assert len(list(target.glob("*.safetensors"))) > 1
    return target


@pytest.mark.parametrize(
    ("model_type", "settings", "adapter"),
    [
        ("llama", {"vocab_size": 511}, "none"),  # the processes get different numbers of rows
        ("gemma2", {"tie_word_embeddings": True}, "none"),  # a buffer next to the rotary table
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "lora-plus"),
    ],
    ids=["uneven", "tied", "adapter"],
)
def test_each_process_reads_its_part_of_a_whole_load(model_type, settings, adapter, build, tmp_path):
    folder = in_several_files(build(model_type, head_dim=32, **settings), tmp_path / "files")
    checkpoint, recipe = open_checkpoint(folder, weights=True), Recipe(data="none", adapter=adapter)
    whole = attach(load_model(checkpoint, dtype="float32", device="cpu"), recipe)
    for rank, count in ((0, 2), (1, 3)):  # torch caches where the parts are by mesh, whatever the rank
        with process(rank, count) as mesh:
            unread = build_unread(checkpoint, dtype="float32", attn="auto")
            model = attach(unread.model, recipe)
            shard(model, mesh)
            unread.read(Launch())
            parts = {name: parameter.to_local() for name, parameter in model.named_parameters(remove_duplicate=False)}
        expected = dict(whole.named_parameters(remove_duplicate=False))
        assert parts.keys() == expected.keys()
        for name, part in parts.items():
            chunks = expected[name].chunk(count)
            assert torch.equal(part, chunks[rank] if rank < len(chunks) else part[:0]), name
        buffers = dict(whole.named_buffers())
        assert buffers.keys() == dict(model.named_buffers()).keys()
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())


def test_result_has_the_files_and_dtypes_of_the_source(build, tmp_path):
    folder = in_several_files(build("llama", head_dim=32), tmp_path / "files")
    checkpoint = open_checkpoint(folder, weights=True)
    unread = build_unread(checkpoint, dtype="float32", attn="auto")
    unread.read(Launch())
    written = tmp_path / "written"
    written.mkdir()
    write_gathered(checkpoint, unread.gathered(), dict.fromkeys(unread.files, torch.bfloat16), written)
    for file in folder.glob("*.safetensors*"):
        assert (written / file.name).read_bytes() == file.read_bytes()


def test_converted_or_unknown_tensors_are_left_to_transformers(build, tmp_path):
    experts = build("mixtral", head_dim=32, num_local_experts=2)
    other = shutil.copytree(build("llama", head_dim=32), tmp_path / "other")
    save_file({**load_file(other / "model.safetensors"), "other": torch.zeros(1)}, other / "model.safetensors")
    for folder in (experts, other):
        assert build_unread(open_checkpoint(folder, weights=True), dtype="float32", attn="auto").files == {}
