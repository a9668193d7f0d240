"""Adapters on tiny models: what is trained, what it changes, and what is written of it."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from ropecli.checkpoint.provenance import read_record
from ropecli.checkpoint.reading import open_checkpoint
from ropecli.errors import RecipeError
from ropecli.evaluate.loading import load_model
from ropecli.finetune import adapters
from ropecli.finetune.loss import NextTokenLoss
from ropecli.finetune.optimizers import make_optimizer
from ropecli.finetune.recipe import make_recipe
from ropecli.finetune.writing import finished_step, write_result

IDS = torch.arange(4, 4 + 2 * 40).reshape(2, 40) * 5 % 512
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
GROUPS = {"n_group": 1, "topk_group": 1}
MODELS = {
    "llama": {"head_dim": 32},
    "tied": {"tie_word_embeddings": True},
    "phi3": {},
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": True},
    "deepseek_v3": {**MLA, **EXPERTS, **GROUPS, "num_key_value_heads": 2},
}
PROJECTIONS = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "tied": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "phi3": {"qkv_proj", "o_proj"},
    "gpt_neox": {"query_key_value", "dense"},
    "falcon": {"query_key_value", "dense"},
    "deepseek_v3": {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
}


@pytest.fixture(scope="module")
def checkpoint_of(build):
    built = {}

    def get(kind):
        if kind not in built:
            built[kind] = open_checkpoint(build("qwen2" if kind == "tied" else kind, **MODELS[kind]))
        return built[kind]

    return get


def recipe_of(adapter="lora", **keys):
    return make_recipe(None, {"data": "demo-train", "adapter": adapter, "mixed_precision": "none", **keys})


def trained(checkpoint, recipe, steps=3):
    """The checkpoint's model with an adapter that some steps have moved."""
    torch.manual_seed(0)
    model = adapters.attach(load_model(checkpoint, dtype="float32", device="cpu"), recipe)
    loss_of = NextTokenLoss(model)
    model.train()
    optimizer = make_optimizer(adapters.trainable(model), recipe)
    for _ in range(steps):
        loss_of(IDS, torch.roll(IDS, -1, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def assert_same(found, expected):
    """Within 1e-5 of the largest logit."""
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def stock(folder: Path, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def keys(folder):
    from safetensors.torch import load_file

    return {name: (tensor.shape, tensor.dtype) for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("kind", MODELS)
def test_by_default_the_attentions_projections_alone_are_trained(checkpoint_of, kind):
    model = adapters.attach(load_model(checkpoint_of(kind), dtype="float32", device="cpu"), recipe_of())
    names = [name for name, _ in adapters.trainable(model)]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == PROJECTIONS[kind]
    assert all(".lora_A." in name or ".lora_B." in name for name in names)
    assert len(names) == 2 * 2 * len(PROJECTIONS[kind])  # two matrices in two layers


@pytest.mark.parametrize("adapter", ["lora", "lora-plus"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_merged_checkpoint_is_the_live_model(checkpoint_of, tmp_path, kind, adapter):
    checkpoint, recipe = checkpoint_of(kind), recipe_of(adapter, learning_rate=1e-2)
    model = trained(checkpoint, recipe)
    write_result(checkpoint, model, recipe, tmp_path, {"recipe": {"steps": 3}})
    written = stock(tmp_path)
    assert_same(logits(written), logits(model))
    assert (logits(written) - logits(stock(checkpoint.folder))).abs().max() > 1e-2
    assert keys(tmp_path) == keys(checkpoint.folder)
    assert finished_step(tmp_path) == 3


@pytest.mark.parametrize("adapter", ["lora", "lora-plus"])
@pytest.mark.parametrize("kind", MODELS)
def test_stock_peft_reads_the_adapter(checkpoint_of, tmp_path, kind, adapter):
    from peft import PeftModel

    checkpoint, recipe = checkpoint_of(kind), recipe_of(adapter, save="adapter", learning_rate=1e-2)
    model = trained(checkpoint, recipe)
    write_result(checkpoint, model, recipe, tmp_path, {"recipe": {"steps": 3}})
    read = PeftModel.from_pretrained(stock(checkpoint.folder), tmp_path).eval()
    assert_same(logits(read), logits(model))
    assert not list(tmp_path.glob("model*"))
    assert finished_step(tmp_path) == 3


def mixed(source, folder, shard):
    """A copy in bfloat16 with its norms in float32; shard: of at most this size, with an index."""
    from safetensors.torch import load_file, save_file

    Path(shutil.copytree(source, folder) / "model.safetensors").unlink()
    tensors = load_file(source / "model.safetensors")
    tensors = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
    if shard:
        files = {name: f"model-{number:05}-of-{len(tensors):05}.safetensors" for number, name in enumerate(tensors, 1)}
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        files = dict.fromkeys(tensors, "model.safetensors")
    for file in set(files.values()):
        held = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(held, folder / file, {"format": "pt"})
    return {name: tensor.dtype for name, tensor in tensors.items()}


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("kind", ["tied", "phi3"])
def test_a_base_of_several_files_and_dtypes_is_merged_as_it_is_read(checkpoint_of, tmp_path, kind, shards):
    """And an adapter of a rank above the width; phi3's queries, keys and values are one matrix."""
    from safetensors.torch import load_file

    dtypes = mixed(checkpoint_of(kind).folder, tmp_path / "base", shards)
    checkpoint = open_checkpoint(tmp_path / "base")
    recipe = recipe_of("lora-plus", learning_rate=1e-2, lora_rank=100)
    model = trained(checkpoint, recipe)
    write_result(checkpoint, model, recipe, tmp_path / "run", {"recipe": {"steps": 3}})
    written = load_file(tmp_path / "run" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == dtypes
    assert not list((tmp_path / "run").glob("*-of-*"))
    assert not list((tmp_path / "run").glob("*.index.json"))
    difference = (logits(stock(tmp_path / "run")) - logits(model)).abs().max() / logits(model).abs().max()
    assert difference < 0.02  # the rounding of bfloat16
    assert (logits(stock(tmp_path / "base")) - logits(model)).abs().max() / logits(model).abs().max() > 0.1


def test_an_adapter_carries_the_patch(patched_llama, llama, tmp_path):
    """The base as it was before the patch, and the adapter's folder alone, are the extended model."""
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoTokenizer

    checkpoint, recipe = open_checkpoint(patched_llama), recipe_of(save="adapter", learning_rate=1e-2)
    model = trained(checkpoint, recipe)
    write_result(checkpoint, model, recipe, tmp_path, {"recipe": {"steps": 3}})
    base = PeftConfig.from_pretrained(tmp_path).base_model_name_or_path
    assert base == str(llama.resolve())
    extended = PeftModel.from_pretrained(stock(base, config=AutoConfig.from_pretrained(tmp_path)), tmp_path)
    assert_same(logits(extended), logits(model))
    forgotten = PeftModel.from_pretrained(stock(base), tmp_path)
    assert (logits(forgotten) - logits(model)).abs().max() > 1e-2
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 128
    assert read_record(tmp_path)["scaling"]["method"] == "yarn"


def test_a_folder_with_its_config_is_not_taken_for_its_base(patched_llama, tmp_path):
    """Were it followed to its base without a word, the model would not be the extended one."""
    checkpoint, recipe = open_checkpoint(patched_llama), recipe_of(save="adapter")
    write_result(checkpoint, trained(checkpoint, recipe), recipe, tmp_path, {"recipe": {"steps": 3}})
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        stock(tmp_path)


def test_trained_again_the_base_is_what_was_trained_before(patched_llama, tmp_path):
    checkpoint = open_checkpoint(patched_llama)
    first, second = tmp_path / "first", tmp_path / "second"
    recipe = recipe_of()
    write_result(checkpoint, trained(checkpoint, recipe), recipe, first, {"recipe": {"steps": 3}})
    once, recipe = open_checkpoint(first), recipe_of(save="adapter")
    write_result(once, trained(once, recipe), recipe, second, {"recipe": {"steps": 3}})
    assert json.loads((second / "adapter_config.json").read_text())["base_model_name_or_path"] == str(first)


def test_a_base_that_has_gone_is_not_named(patched_llama, llama, tmp_path):
    moved = Path(shutil.copytree(patched_llama, tmp_path / "moved"))
    record = (moved / "ropecli.yaml").read_text().replace(str(llama), str(tmp_path / "gone"))
    (moved / "ropecli.yaml").write_text(record)
    checkpoint, recipe = open_checkpoint(moved), recipe_of(save="adapter")
    write_result(checkpoint, trained(checkpoint, recipe), recipe, tmp_path / "run", {"recipe": {"steps": 3}})
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["base_model_name_or_path"] == str(moved)


@pytest.mark.parametrize("patched", [False, True])
def test_of_a_hub_id_the_commit_is_named(llama, tmp_path, patched):
    folder = Path(shutil.copytree(llama, tmp_path / "checkpoint"))
    checkpoint = dataclasses.replace(open_checkpoint(folder), name="some/model", revision="main", commit="1234abc")
    if patched:
        (folder / "ropecli.yaml").write_text(json.dumps({"source": checkpoint.origin()}))
        checkpoint = open_checkpoint(folder)
    recipe = recipe_of(save="adapter")
    write_result(checkpoint, trained(checkpoint, recipe, 1), recipe, tmp_path / "run", {"recipe": {"steps": 1}})
    written = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert (written["base_model_name_or_path"], written["revision"]) == ("some/model", "1234abc")


@pytest.mark.parametrize("without", [None, "lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("adapter", ["none", "lora-plus"])
def test_a_gathered_state_is_what_is_written(checkpoint_of, tmp_path, adapter, without):
    """As an engine gathers it from shards: full tensors, ties undone, or under one of their names alone."""
    checkpoint, recipe = checkpoint_of("tied"), recipe_of(adapter, learning_rate=1e-2)
    model = trained(checkpoint, recipe)
    expected = logits(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != without}
    for parameter in model.parameters():
        parameter.data.zero_()
    write_result(checkpoint, model, recipe, tmp_path, {"recipe": {"steps": 3}}, state)
    assert_same(logits(stock(tmp_path)), expected)
    assert keys(tmp_path) == keys(checkpoint.folder)


def test_lora_plus_trains_embeddings_and_norms_whole(checkpoint_of):
    model = adapters.attach(load_model(checkpoint_of("llama"), dtype="float32", device="cpu"), recipe_of("lora-plus"))
    whole = {name for name, _ in adapters.trainable(model) if ".lora_" not in name}
    layers = {
        f"model.layers.{n}.{norm}.weight" for n in (0, 1) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    assert whole == {"model.embed_tokens.weight", "model.norm.weight", *layers}
    assert not adapters.warnings(model, recipe_of("lora-plus"))


def test_lora_plus_says_that_a_tied_head_moves_too(checkpoint_of):
    recipe = recipe_of("lora-plus", learning_rate=1e-2)
    model = trained(checkpoint_of("tied"), recipe)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "one matrix" in adapters.warnings(model, recipe)[0]


@pytest.mark.parametrize("adapter", ["lora", "lora-plus"])
def test_checkpointing_changes_no_gradient(checkpoint_of, adapter):
    def gradients(checkpointing):
        torch.manual_seed(0)
        model = adapters.attach(load_model(checkpoint_of("llama"), dtype="float32", device="cpu"), recipe_of(adapter))
        loss_of = NextTokenLoss(model)
        model.train()
        for name, parameter in adapters.trainable(model):
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        loss_of(IDS, torch.roll(IDS, -1, 1)).backward()
        return {name: parameter.grad for name, parameter in adapters.trainable(model)}

    plain, recomputed = gradients(False), gradients(True)
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter", ["lora", "lora-plus"])
@pytest.mark.parametrize("kind", MODELS)
def test_beside_a_bfloat16_base_what_is_trained_is_float32(checkpoint_of, kind, adapter, autocast):
    model = load_model(checkpoint_of(kind), dtype="bfloat16", device="cpu")
    adapters.attach(model, recipe_of(adapter))
    assert {parameter.dtype for _, parameter in adapters.trainable(model)} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        loss_of = NextTokenLoss(model)  # its look at the head multiplies bfloat16 by a tied head's float32
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_of(IDS, torch.roll(IDS, -1, 1)).backward()
        hidden = model.base_model(IDS).last_hidden_state
    assert hidden.dtype == torch.bfloat16
    assert all(parameter.grad is not None for _, parameter in adapters.trainable(model))
    assert {parameter.grad.dtype for _, parameter in adapters.trainable(model)} == {torch.float32}


def test_the_same_seed_gives_the_same_start(checkpoint_of):
    def start(seed):
        torch.rand(3)
        model = load_model(checkpoint_of("llama"), dtype="float32", device="cpu")
        return [parameter for _, parameter in adapters.trainable(adapters.attach(model, recipe_of(seed=seed)))]

    first, again, other = start(1), start(1), start(2)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, other))


def test_named_targets(checkpoint_of):
    recipe = recipe_of(lora_targets=["mlp.down_proj", "v_proj"])
    model = adapters.attach(load_model(checkpoint_of("llama"), dtype="float32", device="cpu"), recipe)
    names = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in adapters.trainable(model)}
    assert names == {"down_proj", "v_proj"}


@pytest.mark.parametrize("target", ["q_prj", "mlp", "lm_head", "proj"])
def test_a_target_that_is_no_linear_module_of_the_decoder_is_refused(checkpoint_of, target):
    """The head too: the loss multiplies by its matrix without running it, and would pass an adapter by."""
    model = load_model(checkpoint_of("llama"), dtype="float32", device="cpu")
    with pytest.raises(RecipeError, match=rf"named {target}\. There are: down_proj, gate_proj, k_proj, o_proj, q_proj"):
        adapters.attach(model, recipe_of(lora_targets=["q_proj", target]))


def test_without_an_adapter_the_model_is_as_it_was(checkpoint_of):
    model = load_model(checkpoint_of("llama"), dtype="float32", device="cpu")
    before = [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]
    assert adapters.attach(model, recipe_of("none")) is model
    assert [(name, parameter.requires_grad) for name, parameter in model.named_parameters()] == before


def test_the_summary_counts(checkpoint_of):
    model = adapters.attach(load_model(checkpoint_of("llama"), dtype="float32", device="cpu"), recipe_of(lora_rank=4))
    # q and o: 64 × 64, k and v: 64 × 32, in two layers
    trained_values = 2 * (2 * 4 * (64 + 64) + 2 * 4 * (64 + 32))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert adapters.summary(model) == (
        f"trains {trained_values:,} of {total:,} parameters ({100 * trained_values / total:.2f}%)"
    )


def test_a_runs_checkpoints_hold_what_is_trained_alone(checkpoint_of, tmp_path):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file, save_file

    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    recipe = recipe_of(learning_rate=1e-2)
    model = trained(checkpoint_of("llama"), recipe)
    expected = logits(model)
    loss_of = accelerator.prepare(NextTokenLoss(model))
    adapters.save_trained_alone(accelerator)
    accelerator.save_state(str(tmp_path / "state"))
    saved = load_file(tmp_path / "state" / "model.safetensors")
    assert set(saved) == {f"model.{name}" for name, _ in adapters.trainable(model)}
    for _, parameter in adapters.trainable(loss_of):
        parameter.data.zero_()
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(logits(model), expected)
    saved.pop(next(iter(saved)))
    save_file(saved, tmp_path / "state" / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"model\.safetensors lacks"):
        accelerator.load_state(str(tmp_path / "state"))


def test_qlora_without_bitsandbytes_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="pip install bitsandbytes"):
        adapters.quantization(recipe_of("qlora"))


def test_no_other_adapter_quantizes():
    assert [adapters.quantization(recipe_of(name)) for name in ("none", "lora", "lora-plus")] == [{}, {}, {}]
