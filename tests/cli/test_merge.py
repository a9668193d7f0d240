"""ropecli merge: an adapter's folder and its base become a whole checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ropecli as package

IDS = torch.arange(40)[None] * 7 % 512
WEIGHTS = "adapter_model.safetensors"


def train(checkpoint, output, save="adapter"):
    """A run's end: the checkpoint with an adapter of random values, as write_result leaves it."""
    from ropecli.live.loading import load_model
    from ropecli.training.adapters import attach, trainable
    from ropecli.training.finished_weights import write_result
    from ropecli.training.recipe_schema import make_recipe

    opened = package.open_checkpoint(checkpoint)
    recipe = make_recipe(None, {"data": "demo-train", "adapter": "lora-plus", "save": save})
    model = attach(load_model(opened, dtype="float32", device="cpu"), recipe)
    torch.manual_seed(0)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    request = {"source": opened.origin(), "recipe": recipe.model_dump(mode="json")}
    write_result(opened, model, output, request, save=save)
    return output


@pytest.fixture(scope="module")
def adapter(yarn, tmp_path_factory) -> Path:
    return train(yarn, tmp_path_factory.mktemp("runs") / "adapter")


@pytest.fixture
def changed(adapter, tmp_path):
    """changed(key=value, file=...) -> a copy of the adapter with other keys in its config; a value of ... removes."""

    def change(file: str = "adapter_config.json", **values: object) -> Path:
        folder = Path(shutil.copytree(adapter, tmp_path / f"changed-{len(list(tmp_path.iterdir()))}"))
        config = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
        return folder

    return change


@pytest.fixture
def refused(ropecli, tmp_path):
    """refused(adapter, message, ...) -> a merge ends with this message and writes nothing."""

    def check(folder: Path, message: str, *options: object) -> None:
        ropecli("merge", folder, "-o", tmp_path / "whole", *options).is_refused(message)
        assert not (tmp_path / "whole").exists()

    return check


@torch.no_grad()
def logits(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


def test_it_is_what_merging_at_once_would_have_written(ropecli, yarn, adapter, contents, tmp_path):
    at_once = train(yarn, tmp_path / "at-once", save="merged")
    outcome = ropecli("merge", adapter, "--output", tmp_path / "whole", "--json")
    assert outcome.err == f"Opening {adapter} ...\n"
    assert outcome.json()["base"]["checkpoint"] == str(yarn)
    assert outcome.json()["matrices"] == 8
    whole, expected = contents(tmp_path / "whole"), contents(at_once)
    assert whole.keys() == expected.keys()
    assert {name for name in whole if whole[name] != expected[name]} == {"ropecli.yaml"}
    assert (logits(tmp_path / "whole") - logits(yarn)).abs().max() > 1e-2


@pytest.mark.parametrize("of_peft", [False, True])
def test_a_merged_result_is_neither_merged_again_nor_reverted(ropecli, refused, yarn, changed, tmp_path, of_peft):
    """of_peft: a folder without ropecli's record of the training, on a patched base."""
    folder, whole = changed(), tmp_path / "merged"
    for name in ("config.json", "ropecli.yaml") if of_peft else ():
        (folder / name).unlink()
    ropecli("merge", folder, "-o", whole).succeeds()
    refused(whole, "has no adapter_config.json, so there is no adapter to merge")
    trained = "weights were trained after the patch, so there is no original to go back to. Use the checkpoint that"
    ropecli("revert", whole, "-o", tmp_path / "reverted").is_refused(trained)
    ropecli("patch", whole, "--method", "ntk", "--factor", 8, "--no-verify", "-o", tmp_path / "again").succeeds()
    ropecli("revert", tmp_path / "again", "--dry-run").is_refused(trained)


def test_an_adapter_is_measured_on_its_base_with_its_own_config(ropecli, llama, adapter, changed, corpus, tmp_path):
    def measured(checkpoint):
        return ropecli("eval-ppl", checkpoint, "--data", corpus, "--lengths", "48,128", "--json")

    def losses(outcome):
        return [row["nll"] for row in outcome.report()["rows"]]

    ropecli("merge", adapter, "--output", tmp_path / "whole").succeeds()
    expected = losses(measured(tmp_path / "whole"))
    for folder in (adapter, changed(base_model_name_or_path=str(llama))):  # the base as it was before the patch
        outcome = measured(folder)
        assert losses(outcome) == pytest.approx(expected, rel=1e-6)
        assert "different weights" not in outcome.err
    measured(changed(base_model_name_or_path="nowhere")).is_refused("--base")


def test_a_base_with_other_weights_is_warned_of(ropecli, yarn, adapter, tmp_path):
    same = ropecli("merge", adapter, "-o", tmp_path / "same", "--base", yarn).succeeds()
    assert "warning" not in same.err
    other = Path(shutil.copytree(yarn, tmp_path / "base"))
    tensors = load_file(other / "model.safetensors")
    (other / "model.safetensors").unlink()
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, other / "model.safetensors", {"format": "pt"})
    outcome = ropecli("merge", adapter, "-o", tmp_path / "other", "--base", other).succeeds()
    assert "trained on different weights" in outcome.err


@pytest.mark.parametrize(("part", "value"), [(".lora_", 1e30), (".lora_B", float("nan")), ("norm", float("inf"))])
def test_weights_that_are_not_finite_are_not_written(ropecli, refused, adapter, changed, yarn, tmp_path, part, value):
    """Weights of the adapter, or of a product with it. Those of the base are not the adapter's fault."""
    base = Path(shutil.copytree(yarn, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = float("nan")
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    ropecli("merge", adapter, "-o", tmp_path / "merged", "--base", base).succeeds()
    folder = changed()
    learned = load_file(folder / WEIGHTS)
    save_file(
        {name: tensor * (value if part in name else 1) for name, tensor in learned.items()},
        folder / WEIGHTS,
        {"format": "pt"},
    )
    refused(folder, "not finite")


@pytest.mark.parametrize("settings", [{"hidden_size": 128}, {"num_hidden_layers": 1}])
def test_a_base_that_does_not_fit_is_refused(refused, build, changed, settings):
    plain = changed()
    (plain / "config.json").unlink()  # so that the base's own is taken, as with peft's own folders
    refused(plain, "does not fit", "--base", build("llama", **{"head_dim": 32, **settings}))


BOTH = ["embed_tokens", "lm_head"]
# an adapter's config, whether the base is tied, the size of the vocabulary, and the names that peft writes
PEFTS = {
    "embeddings": ({"target_modules": ["q_proj", "embed_tokens"]}, False, 512, ".base_layer."),
    "embeddings and head": ({"target_modules": ["q_proj", *BOTH]}, False, 520, ".base_layer."),
    "dora": ({"use_dora": True}, False, 512, ""),
    "untied": ({"modules_to_save": BOTH}, True, 512, ""),
    "half untied": ({"modules_to_save": ["embed_tokens"]}, True, 512, ""),
    "untied by a head's LoRA": ({"target_modules": ["q_proj", "lm_head"]}, True, 512, ".base_layer."),
    "tied and resized": ({"modules_to_save": BOTH}, True, 520, ".modules_to_save."),
    "resized": ({"modules_to_save": BOTH}, False, 520, ".original_module."),
    "tokens": ({"trainable_token_indices": [3, 4]}, True, 512, ""),
}


@pytest.mark.parametrize(("keys", "tied", "rows", "written"), PEFTS.values(), ids=PEFTS)
def test_pefts_own_folder_is_merged_too(ropecli, build, tmp_path, keys, tied, rows, written):
    """With peft's logits and, unless it adds a product to tied weights twice, the weights of its own merge.

    config.json says what the adapter changed.
    """
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def resized_base():
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        base.resize_token_embeddings(rows, mean_resizing=False)
        return base

    folder = build("llama", tie_word_embeddings=tied)
    model = get_peft_model(
        resized_base(), LoraConfig(r=4, init_lora_weights=False, **{"target_modules": ["q_proj"], **keys})
    )
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += number * 1e-3 if parameter.requires_grad else 0
        expected = model.eval()(IDS).logits
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(tmp_path / "adapter")
    assert any(written in name for name in load_file(tmp_path / "adapter" / WEIGHTS))
    whole = tmp_path / "whole"
    outcome = ropecli("merge", tmp_path / "adapter", "-o", whole).succeeds()
    assert f": {1 + len(keys.get('target_modules', [1]))} matrices" in outcome.out
    assert (logits(whole) - expected).abs().max() < 1e-5 * expected.abs().max()
    is_untied = tied and bool(keys.keys() & {"modules_to_save", "target_modules"})
    if not (is_untied and "target_modules" in keys):
        pefts = PeftModel.from_pretrained(resized_base(), tmp_path / "adapter").merge_and_unload().state_dict()
        merged = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).state_dict()
        assert merged.keys() == pefts.keys()
        for name, tensor in merged.items():
            torch.testing.assert_close(tensor, pefts[name], rtol=1e-6, atol=1e-6)
    config = json.loads((whole / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (rows, tied and not is_untied)


@pytest.mark.parametrize(
    "values",
    [
        {"peft_type": "IA3"},
        {"init_lora_weights": "pissa"},
        {"megatron_config": {"x": 1}},
        {"layer_replication": [[0, 2]]},
        {"lora_alpha": None},
    ],
    ids=str,
)
def test_what_the_merge_does_not_know_is_refused(refused, changed, values):
    [key] = values
    refused(changed(**values), key if values[key] else "adapter_config.json")


def test_a_damaged_adapter_is_refused(refused, changed, adapter, yarn):
    broken = changed()
    (broken / WEIGHTS).write_bytes(b"nothing")
    refused(broken, "Cannot read the adapter")
    tensors = load_file(adapter / WEIGHTS)
    name = next(name for name in tensors if "lora_A" in name)
    for damaged in (
        {other: tensor for other, tensor in tensors.items() if other != name},
        {**tensors, name.replace("layers.0", "layers.7"): tensors[name].clone()},
    ):
        save_file(damaged, broken / WEIGHTS, {"format": "pt"})
        refused(broken, "does not fit")
    (broken / "config.json").write_text("{")
    refused(broken, f"{broken / 'config.json'} cannot be read", "--base", yarn)
