"""Loading: the dtype that was asked for with exact positions, and one clear message for what cannot be loaded."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ropecli.checkpoint.opening import open_checkpoint
from ropecli.errors import CheckpointError
from ropecli.live.loading import (
    choose_device,
    load_model,
    load_tokenizer,
    resolve_dtype_and_device,
    vocabulary_mismatch,
)
from ropecli.live.rotary import rotary_tables


@pytest.fixture
def copied(llama, tmp_path):
    """A copy of the checkpoint to damage."""
    return shutil.copytree(llama, tmp_path / "copied")


def test_the_rotary_tables_stay_exact_in_bfloat16(llama, loaded):
    model = load_model(open_checkpoint(llama), dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training
    for table, exact in zip(rotary_tables(model), rotary_tables(loaded(llama)), strict=True):
        assert (table.inv_freq == exact.inv_freq).all()


def test_the_default_device_is_the_best_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    for name in ("cuda", "cuda:1", "nonsense", "meta"):
        with pytest.raises(CheckpointError, match=f"--device {name}"):
            choose_device(name)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert resolve_dtype_and_device("auto", "auto") == ("bfloat16", "mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")  # as a shell may have it
    assert choose_device("auto") == "cuda"
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "8")  # each process of a launch takes a GPU of its own
    assert choose_device("auto") == "cuda:3"
    assert choose_device("cpu") == "cpu"


def test_vocabularies_of_different_sizes_give_a_warning(llama, loaded, tokenizer):
    model = loaded(llama)  # 512 rows; the tokenizer has 459 tokens
    assert "459" in vocabulary_mismatch(tokenizer, model)
    for rows, differs in ((459, False), (510, False), (511, True), (458, True)):
        model.resize_token_embeddings(rows)
        assert (vocabulary_mismatch(tokenizer, model) is not None) == differs


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_weights_that_lack_a_tensor_are_refused(copied):
    """transformers would fill it with random numbers, and only warn."""
    rewrite(copied, lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj"):
        load_model(open_checkpoint(copied))
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"damaged|cannot be loaded"):
        load_model(open_checkpoint(copied))


@pytest.mark.parametrize(
    ("change", "unused"),
    [
        ({"num_hidden_layers": 1}, "13 tensors"),
        ({"attention_bias": False}, "self_attn.k_proj.bias"),
    ],
)
def test_weights_that_the_config_does_not_use_are_named_or_refused(build, edited, change, unused):
    """transformers drops them, and only logs it."""
    folder = edited(build("llama", head_dim=32, attention_bias=True), **change)
    told = []
    load_model(open_checkpoint(folder), device="cpu", say=told.append)
    assert unused in "".join(told)
    with pytest.raises(CheckpointError, match=unused):
        load_model(open_checkpoint(folder), device="cpu")


def test_tensors_that_transformers_ignores_are_not_called_unused(copied, build, edited):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    old_table = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(copied, lambda weights: weights.update({old_table: torch.ones(16)}))
    load_model(open_checkpoint(copied), device="cpu")

    glm = build("glm4_moe", head_dim=32, first_k_dense_replace=2)  # its next layer predicts a second token
    rewrite(glm, lambda weights: weights.update({"model.layers.2.eh_proj.weight": torch.ones(2, 2)}))
    load_model(open_checkpoint(edited(glm, num_nextn_predict_layers=1)), device="cpu")


def test_a_broken_tokenizer_is_refused(copied):
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer cannot be loaded"):
        load_tokenizer(open_checkpoint(copied))
