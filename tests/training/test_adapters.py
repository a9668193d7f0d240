"""Adapters on tiny models: what is trained, what it changes, and what is written of it."""

import functools
from pathlib import Path

import pytest
import torch

from ropecli.checkpoint.files import read_record
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.errors import RecipeError
from ropecli.live.loading import load_model
from ropecli.training import adapters
from ropecli.training.finished_weights import write_result
from ropecli.training.loop import make_optimizer
from ropecli.training.loss import NextTokenLoss
from ropecli.training.recipe_schema import make_recipe

IDS = torch.arange(4, 4 + 2 * 40).reshape(2, 40) * 5 % 512
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
GROUPS = {"n_group": 1, "topk_group": 1}
MODELS = {
    "llama": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "gpt_neox": {},
    "deepseek_v3": {**MLA, **EXPERTS, **GROUPS, "num_key_value_heads": 2},
}
PROJECTIONS = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "tied": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "gpt_neox": {"query_key_value", "dense"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
}


@pytest.fixture(scope="module")
def checkpoint_of(build):
    return functools.cache(lambda kind: open_checkpoint(build("qwen2" if kind == "tied" else kind, **MODELS[kind])))


def recipe_of(adapter="lora", **keys):
    return make_recipe(None, {"data": "demo-train", "adapter": adapter, "mixed_precision": "none", **keys})


def trained(checkpoint, recipe, steps=3):
    """The checkpoint's model with an adapter that some steps have moved."""
    torch.manual_seed(0)
    model = adapters.attach(load_model(checkpoint, dtype="float32", device="cpu"), recipe)
    loss_of = NextTokenLoss(model)
    model.train()
    optimizer = make_optimizer(model, recipe)
    for _ in range(steps):
        loss_of(IDS, torch.roll(IDS, -1, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def assert_same(actual, expected):
    """Within 1e-5 of the largest logit."""
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def stock(folder: Path, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def keys(folder):
    from safetensors.torch import load_file

    return {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("kind", MODELS)
def test_only_attention_projections_are_trained_by_default(checkpoint_of, kind):
    model = adapters.attach(load_model(checkpoint_of(kind), dtype="float32", device="cpu"), recipe_of())
    names = [name for name, _ in adapters.trainable(model)]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == PROJECTIONS[kind]
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert len(names) == 2 * 2 * len(PROJECTIONS[kind])  # two matrices in two layers


@pytest.mark.parametrize(("kind", "adapter"), [*((kind, "lora-plus") for kind in MODELS), ("llama", "lora")])
def test_merged_checkpoint_and_stock_peft_give_the_live_logits(checkpoint_of, tmp_path, kind, adapter):
    from peft import PeftModel

    checkpoint, recipe = checkpoint_of(kind), recipe_of(adapter, learning_rate=1e-2)
    model = trained(checkpoint, recipe)
    expected = logits(model)
    alone, whole = tmp_path / "alone", tmp_path / "whole"
    write_result(checkpoint, model, alone, {"recipe": {"steps": 3}}, save="adapter")
    write_result(checkpoint, model, whole, {"recipe": {"steps": 3}})
    written = stock(whole)
    assert_same(logits(written), expected)
    assert (logits(written) - logits(stock(checkpoint.folder))).abs().max() > 1e-2
    assert keys(whole) == keys(checkpoint.folder)
    assert_same(logits(PeftModel.from_pretrained(stock(checkpoint.folder), alone).eval()), expected)
    assert not list(alone.glob("model*"))


def test_adapter_names_the_patched_base_and_has_the_patched_config(patched_llama, llama, tmp_path):
    """The base that it names is enough; so is the base before the patch, with the config in the adapter's folder."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoTokenizer

    checkpoint, recipe = open_checkpoint(patched_llama), recipe_of(learning_rate=1e-2)
    model = trained(checkpoint, recipe)
    write_result(checkpoint, model, tmp_path, {"recipe": {"steps": 3}}, save="adapter")
    base = PeftConfig.from_pretrained(tmp_path).base_model_name_or_path
    assert base == str(patched_llama.resolve())
    assert_same(logits(PeftModel.from_pretrained(stock(base), tmp_path)), logits(model))
    extended = PeftModel.from_pretrained(stock(llama, config=AutoConfig.from_pretrained(tmp_path)), tmp_path)
    assert_same(logits(extended), logits(model))
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 128
    assert read_record(tmp_path)["scaling"]["method"] == "yarn"


@pytest.mark.parametrize(
    ("adapter", "without"), [("none", None), ("none", "lm_head.weight"), ("lora-plus", "model.embed_tokens.weight")]
)
def test_gathered_state_is_what_is_written(checkpoint_of, tmp_path, adapter, without):
    """As an engine gathers it from shards: full tensors, ties undone, or under one of their names alone."""
    checkpoint, recipe = checkpoint_of("tied"), recipe_of(adapter, learning_rate=1e-2)
    model = trained(checkpoint, recipe)
    expected = logits(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != without}
    for parameter in model.parameters():
        parameter.data.zero_()
    write_result(checkpoint, model, tmp_path, {"recipe": {"steps": 3}}, state=state)
    assert_same(logits(stock(tmp_path)), expected)
    assert keys(tmp_path) == keys(checkpoint.folder)


@pytest.mark.parametrize(("kind", "autocast"), [("llama", False), ("tied", True)])
def test_trained_parameters_of_a_bfloat16_base_are_float32(checkpoint_of, kind, autocast):
    model = load_model(checkpoint_of(kind), dtype="bfloat16", device="cpu")
    adapters.attach(model, recipe_of("lora-plus"))
    assert {parameter.dtype for _, parameter in adapters.trainable(model)} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        loss_of = NextTokenLoss(model)  # its look at the head multiplies bfloat16 by a tied head's float32
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_of(IDS, torch.roll(IDS, -1, 1)).backward()
        hidden = model.base_model(IDS).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    assert all(parameter.grad is not None for _, parameter in adapters.trainable(model))
    assert {parameter.grad.dtype for _, parameter in adapters.trainable(model)} == {torch.float32}


def test_target_that_is_no_linear_module_of_the_decoder_is_refused(checkpoint_of):
    """The head too: the loss multiplies by its matrix without running it, and would pass an adapter by."""
    model = load_model(checkpoint_of("llama"), dtype="float32", device="cpu")
    for target in ("q_prj", "mlp", "lm_head"):
        with pytest.raises(RecipeError, match=rf"named {target}\. Linear modules: down_proj, gate_proj, k_proj"):
            adapters.attach(model, recipe_of(lora_targets=["q_proj", target]))


def test_training_checkpoint_has_only_trained_parameters(checkpoint_of, tmp_path):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    recipe = recipe_of(learning_rate=1e-2)
    model = trained(checkpoint_of("llama"), recipe)
    expected = logits(model)
    loss_of = accelerator.prepare(NextTokenLoss(model))
    adapters.save_only_trained(accelerator)
    accelerator.save_state(str(tmp_path / "state"))
    saved = load_file(tmp_path / "state" / "model.safetensors")
    assert set(saved) == {f"model.{name}" for name, _ in adapters.trainable(model)}
    for _, parameter in adapters.trainable(loss_of):
        parameter.data.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(logits(model), expected)
