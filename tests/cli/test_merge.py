"""ropecli merge: an adapter's folder and its base become a whole checkpoint."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch

IDS = torch.arange(40)[None] * 7 % 512


def train(checkpoint, output, adapter="lora-plus", save="adapter", seed=0):
    """A run's end: the checkpoint with an adapter of random values, as write_result leaves it."""
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.live.loading import load_model
    from ropecli.training.adapters import attach, trainable
    from ropecli.training.finished_weights import write_result
    from ropecli.training.settings import make_recipe

    opened = open_checkpoint(checkpoint)
    recipe = make_recipe(None, {"data": "demo-train", "adapter": adapter, "save": save})
    model = attach(load_model(opened, dtype="float32", device="cpu"), recipe)
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    asked = {"source": opened.origin(), "recipe": recipe.model_dump(mode="json")}
    write_result(opened, model, output, asked, save=save)
    return output


@pytest.fixture(scope="module")
def patched(llama, tmp_path_factory) -> Path:
    from ropecli.attention.patching import patch_to
    from ropecli.checkpoint.opening import open_checkpoint
    from ropecli.checkpoint.patch_plan import make_plan
    from ropecli.scaling.spec import make_spec

    output = tmp_path_factory.mktemp("patched") / "yarn"
    patch_to(make_plan(open_checkpoint(llama), make_spec("yarn", 2.0)), output)
    return output


@pytest.fixture(scope="module")
def adapter(patched, tmp_path_factory) -> Path:
    return train(patched, tmp_path_factory.mktemp("runs") / "adapter")


@torch.no_grad()
def logits(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


def test_it_is_what_merging_at_once_would_have_written(ropecli, patched, adapter, contents, tmp_path):
    at_once = train(patched, tmp_path / "at-once", save="merged")
    outcome = ropecli("merge", adapter, "--output", tmp_path / "whole", "--json")
    assert outcome.code == 0, outcome.err
    assert not outcome.err
    printed = json.loads(outcome.out)
    assert printed["base"]["checkpoint"] == str(patched)
    assert printed["matrices"] == 8
    whole, expected = contents(tmp_path / "whole"), contents(at_once)
    assert whole.keys() == expected.keys()
    assert {name for name in whole if whole[name] != expected[name]} == {"ropecli.yaml"}
    assert (logits(tmp_path / "whole") - logits(patched)).abs().max() > 1e-2


def test_an_adapter_is_measured_on_its_base_with_its_own_config(ropecli, llama, adapter, corpus, tmp_path):
    ropecli("merge", adapter, "--output", tmp_path / "whole")
    older = Path(shutil.copytree(adapter, tmp_path / "older"))  # names the base as it was before the patch
    config = json.loads((older / "adapter_config.json").read_text())
    (older / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(llama)}))

    def measured(checkpoint):
        outcome = ropecli("eval-ppl", checkpoint, "--data", corpus, "--lengths", "48,128", "--json")
        assert outcome.code == 0, outcome.err
        return [row["nll"] for row in json.loads(outcome.out)["rows"]], outcome.err

    expected, _ = measured(tmp_path / "whole")
    for folder in (adapter, older):
        found, said = measured(folder)
        assert found == pytest.approx(expected, rel=1e-6)
        assert "different weights" not in said
    (older / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "nowhere"}))
    outcome = ropecli("eval-ppl", older, "--data", corpus, "--lengths", "48")
    assert outcome.code == 2
    assert "--base" in outcome.err


def test_another_base_is_said(ropecli, build, patched, adapter, tmp_path):
    same = ropecli("merge", adapter, "-o", tmp_path / "same", "--base", patched)
    assert same.code == 0
    assert "warning" not in same.err
    other = Path(shutil.copytree(patched, tmp_path / "base"))
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    (other / "model.safetensors").unlink()
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    outcome = ropecli("merge", adapter, "-o", tmp_path / "other", "--base", other)
    assert outcome.code == 0
    assert "trained on different weights" in outcome.err


@pytest.mark.parametrize("settings", [{"hidden_size": 128}, {"num_hidden_layers": 1}])
def test_a_base_that_does_not_fit_is_refused(ropecli, build, adapter, tmp_path, settings):
    other = build("llama", **{"head_dim": 32, **settings})
    plain = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    (plain / "config.json").unlink()  # so that the base's own is taken, as with peft's own folders
    outcome = ropecli("merge", plain, "-o", tmp_path / "whole", "--base", other)
    assert outcome.code == 2
    assert "does not fit" in outcome.err
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_do_not_fill_the_adapters_config_are_refused(ropecli, build, adapter, tmp_path, tied):
    """For tied weights, transformers compares the tensors of the two shapes, and fails."""
    copy = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    config = json.loads((copy / "config.json").read_text()) | {"tie_word_embeddings": tied}
    (copy / "config.json").write_text(json.dumps(config))
    base = build("llama", hidden_size=128)
    outcome = ropecli("merge", copy, "-o", tmp_path / "whole", "--base", base)
    assert outcome.code == 2
    expected = "lm_head.weight has shape (512, 128); config.json implies (512, 64)."
    assert f"adapter does not fit {base}: {expected}" in outcome.err
    assert not (tmp_path / "whole").exists()


@pytest.mark.parametrize(
    ("keys", "matrices"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, 3),
        ({"target_modules": ["q_proj"], "use_dora": True}, 2),
        ({"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"0.self_attn.q_proj": 3}}, 2),
    ],
    ids=["embeddings", "dora", "rslora"],
)
def test_pefts_own_folder_is_merged_too(ropecli, llama, tmp_path, keys, matrices):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, init_lora_weights=False, **keys))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    outcome = ropecli("merge", tmp_path / "adapter", "-o", tmp_path / "whole", "--base", llama)
    assert outcome.code == 0, outcome.err
    assert f": {matrices} matrices" in outcome.out
    base = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(IDS).logits
    assert (logits(tmp_path / "whole") - expected).abs().max() < 1e-5 * expected.abs().max()


def test_what_is_no_adapter_is_refused(ropecli, llama, adapter, tmp_path):
    outcome = ropecli("merge", llama, "-o", tmp_path / "whole")
    assert (outcome.code, "expected adapter_config.json" in outcome.err) == (2, True)
    broken = Path(shutil.copytree(adapter, tmp_path / "broken"))
    (broken / "adapter_model.safetensors").write_bytes(b"nothing")
    outcome = ropecli("merge", broken, "-o", tmp_path / "whole")
    assert (outcome.code, "Cannot read the adapter" in outcome.err) == (2, True)
    for key, value in {
        "peft_type": "IA3",
        "init_lora_weights": "pissa",
        "megatron_config": {"x": 1},
        "layer_replication": [[0, 2]],
    }.items():
        folder = Path(shutil.copytree(adapter, tmp_path / key))
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        outcome = ropecli("merge", folder, "-o", tmp_path / "whole")
        assert (outcome.code, key in outcome.err) == (2, True), outcome.err
    assert not (tmp_path / "whole").exists()


def test_values_of_another_type_in_an_adapters_config_are_one_message(ropecli, adapter, tmp_path):
    folder = Path(shutil.copytree(adapter, tmp_path / "adapter"))
    config = json.loads((folder / "adapter_config.json").read_text())
    for key, value in (("r", "8"), ("lora_alpha", None), ("target_modules", 5), ("base_model_name_or_path", 5)):
        (folder / "adapter_config.json").write_text(json.dumps({**config, key: value}))
        outcome = ropecli("merge", folder, "-o", tmp_path / "whole")
        assert outcome.code == 2
        assert "adapter_config.json" in outcome.err
        assert "Traceback" not in outcome.err
        assert not (tmp_path / "whole").exists()


def test_what_cannot_be_read_is_named_where_it_lies(ropecli, patched, adapter, tmp_path):
    broken = Path(shutil.copytree(adapter, tmp_path / "broken"))
    for text, named in (("{", f"{broken / 'config.json'} cannot be read"), ("{}", f"Unrecognized model in {broken}")):
        (broken / "config.json").write_text(text)
        outcome = ropecli("merge", broken, "-o", tmp_path / "whole", "--base", patched)
        assert (outcome.code, named in outcome.err) == (2, True), outcome.err


def test_tensors_missing_or_too_many_are_refused(ropecli, adapter, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    one = next(name for name in tensors if "lora_A" in name)
    without = {name: tensor for name, tensor in tensors.items() if name != one}
    more = {**tensors, one.replace("layers.0", "layers.7"): tensors[one].clone()}
    for number, changed in enumerate((without, more)):
        folder = Path(shutil.copytree(adapter, tmp_path / str(number)))
        save_file(changed, folder / "adapter_model.safetensors", {"format": "pt"})
        outcome = ropecli("merge", folder, "-o", tmp_path / "whole")
        assert (outcome.code, "does not fit" in outcome.err) == (2, True), outcome.err


def test_a_full_disk_is_said_and_leaves_nothing(ropecli, adapter, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        outcome = ropecli("merge", adapter, "-o", tmp_path / "whole")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.code == 2
    assert "whole could not be written" in outcome.err
    assert "File too large" in outcome.err
    assert list(tmp_path.iterdir()) == []
