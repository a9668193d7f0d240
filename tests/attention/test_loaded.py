"""check_loaded finds a model that does not compute the scaling of its files, and never blames one that does."""

import copy
import re

import pytest
import torch

import ropecli
from ropecli.attention.loaded import check_loaded
from ropecli.errors import ProofError
from ropecli.live.rotary import rotary_tables

YARN = {"attention_factor": 1.3}
COMPARED = "1 rotary tables and 2 attention layers were compared."
TWO_LISTS = {"long_factor": [4.0] * 16, "short_factor": [1.1] * 16}
LAYERS = {"head_dim": 32, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}


@pytest.fixture(scope="module")
def folders(build, tmp_path_factory):
    """By name: a checkpoint, patched by yarn or by what the name says."""
    made = {"unscaled": build("llama", head_dim=32)}
    gemma = build("gemma3_text", **LAYERS)
    for name, source, method, params in (
        ("llama", made["unscaled"], "yarn", YARN),
        ("gemma", gemma, "linear", {}),
        ("dynamic", made["unscaled"], "dynamic", {}),
        ("longrope", made["unscaled"], "longrope", TWO_LISTS),
        ("rerope", made["unscaled"], "yarn+rerope", {}),
    ):
        made[name] = tmp_path_factory.mktemp("loaded") / name
        ropecli.patch(str(source), method=method, factor=4, settings=params, output=str(made[name]))
    return made


def load(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj", "k_proj"]))


WRAPPERS = {
    "plain": ({}, lambda model: model.train()),
    "bfloat16": ({"dtype": torch.bfloat16}, lambda model: model),
    "peft": ({}, with_lora),
    "compile": ({}, torch.compile),
}


def table(model):
    return rotary_tables(model)[-1].module


def unscaled(model, folders):
    table(model).inv_freq = table(load(folders["unscaled"])).inv_freq


def other_factor(model, folders):
    table(model).inv_freq = table(model).inv_freq * 1.5


def other_layer_type(model, folders):
    table(model).full_attention_inv_freq = table(model).sliding_attention_inv_freq


def own_module(model, folders):
    """Its table is right, but it returns cos and sin that were computed before the scaling."""
    rotary = table(load(folders["unscaled"]))
    table(model).forward = lambda *arguments: tuple(1.3 * part for part in rotary.forward(*arguments))


def other_function(model, folders):
    model.model.layers[1].self_attn.forward = Unrotated(model.model.layers[1].self_attn)


class Unrotated:
    """The forward pass of a layer that forgets its positions."""

    def __init__(self, attention):
        self.forward = attention.forward

    def __call__(self, *arguments, position_embeddings, **named):
        cos, sin = position_embeddings
        return self.forward(*arguments, position_embeddings=(torch.ones_like(cos), 0 * sin), **named)


def other_scale(model, folders):
    model.model.layers[1].self_attn.scaling *= 1.1


def other_positions(model, folders):
    forward = model.forward

    def halved(*arguments, position_ids=None, **named):
        return forward(*arguments, position_ids=None if position_ids is None else position_ids // 2, **named)

    model.forward = halved


ALTERED = {
    "scale": ("llama", other_scale, "Layer 1 .*: its softmax scale is 0.194454; transformers' is 0.176777"),
    "unscaled": ("llama", unscaled, r"pair \d+ rotates .* unscaled frequencies.* changed after loading"),
    "factor": ("llama", other_factor, r"pair \d+ rotates by"),
    "layer type": ("gemma", other_layer_type, "frequencies of sliding_attention"),
    "module": ("llama", own_module, "the cos and sin of a token at 255 in the loaded model differ"),
    "function": ("llama", other_function, "Layer 1 .*LlamaAttention.forward is now .*Unrotated"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("alteration", [None, *ALTERED])
def test_what_was_lost_is_named_in_every_wrapper(wrapper, alteration, folders):
    options, wrap = WRAPPERS[wrapper]
    name, alter, message = ALTERED.get(alteration, ("llama", None, ""))
    model = load(folders[name], **options)
    if alter:
        alter(model, folders)
    model = wrap(model)
    if alter:
        with pytest.raises(ProofError, match=f"does not compute the scaling of .*{message}"):
            check_loaded(model, folders[name])
        assert check_loaded(model, folders[name], strict=False).differences
    else:
        check = check_loaded(model, folders[name])
        assert (check.tables, check.layers, check.unproved) == (1, 2, ())


@pytest.mark.parametrize("name", ["gemma", "dynamic", "longrope", "rerope"])
def test_a_model_that_was_used_is_not_blamed_and_stays_as_it_was(name, folders):
    model = load(folders[name]).train()
    model.gradient_checkpointing_enable()
    ids = torch.arange(200)[None]
    model(input_ids=ids, labels=ids).loss.backward()  # tables that follow the length are now those of 200 tokens
    before = copy.deepcopy([vars(table.module) for table in rotary_tables(model)])
    output = model(input_ids=ids).logits
    check = check_loaded(model, folders[name])
    assert (check.differences, check.unproved, check.layers) == ((), (), 2)
    assert model.training
    assert torch.equal(output, model(input_ids=ids).logits)
    assert all(part.training for part in model.modules())
    assert [vars(table.module).keys() for table in rotary_tables(model)] == [each.keys() for each in before]


def test_a_function_replaced_in_the_module_is_named_with_its_source(folders, monkeypatch):
    from transformers.models.llama import modeling_llama

    rotate = modeling_llama.apply_rotary_pos_emb

    def lossy(q, k, cos, sin, **named):
        return rotate(q, k, cos / 1.3, sin / 1.3, **named)

    model = load(folders["llama"])
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lossy)
    with pytest.raises(ProofError, match=rf"Layer 0 .*: apply_rotary_pos_emb is now {__name__}\..*lossy"):
        check_loaded(model, folders["llama"])


def test_positions_that_a_forward_pass_changes_are_found(folders):
    model = load(folders["llama"])
    other_positions(model, folders)
    with pytest.raises(ProofError, match=r"do not get 0 to 11 as the positions .*A forward pass was replaced"):
        check_loaded(model, folders["llama"])


def test_what_cannot_be_compared_is_said(folders):
    two = torch.nn.ModuleDict({"reference": load(folders["unscaled"]), "policy": load(folders["llama"])})
    for model, reason in (
        (two, r"holds several models \(reference, policy\): check the one in use"),
        (load(folders["llama"]).to("meta"), "on the device meta"),
        (load(folders["llama"]), "queries or keys are not finite"),
    ):
        if "finite" in reason:
            model.model.layers[0].self_attn.q_proj.weight.data[:] = torch.nan
        check = check_loaded(model, folders["llama"])
        assert not check.differences
        assert re.search(reason, " ".join(check.unproved))
    assert check_loaded(two["policy"], folders["llama"]).layers == 2


def test_the_cause_is_named(folders, tmp_path):
    """Altered by transformers, torch and PEFT themselves."""
    from peft import AutoPeftModelForCausalLM

    folder = folders["llama"]
    with pytest.raises(ProofError, match="cast after loading"):
        check_loaded(load(folder).to(torch.bfloat16), folder)
    other = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    with pytest.raises(ProofError, match=r"rope_parameters\.factor is 2\.0, not 4\.0.*override config.json"):
        check_loaded(load(folder, rope_parameters=other), folder)
    with_lora(load(folders["unscaled"])).save_pretrained(tmp_path)  # the adapter names the unpatched base
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ProofError, match=f"unscaled frequencies.*loaded from another folder.*{folders['unscaled']}"):
        check_loaded(adapted, folder)
    model = load(folders["rerope"])
    model.set_attn_implementation("sdpa")
    with pytest.raises(ProofError, match=r"The attention is sdpa, but \S*rerope needs"):
        check_loaded(model, folders["rerope"])


@pytest.mark.parametrize("on_difference", ["stop", "warn"])
def test_the_trainer_stops_or_warns(on_difference, folders, tmp_path, caplog):
    from transformers import Trainer, TrainingArguments

    from ropecli.integrations import ScalingCallback

    def train(folder, steps=2):
        rows = [{"input_ids": list(range(16)), "labels": list(range(16))}] * 4
        arguments = TrainingArguments(
            tmp_path, max_steps=steps, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
        )
        callback = ScalingCallback(folders["llama"], on_difference=on_difference)
        trainer = Trainer(load(folder), arguments, train_dataset=rows, callbacks=[callback])
        trainer.train()
        return trainer

    train(folders["llama"])
    says = [record.message for record in caplog.records if record.name == "ropecli"]
    assert says == [f"The model computes the scaling of {folders['llama']}: {COMPARED}"] * 2
    if on_difference == "stop":
        with pytest.raises(ProofError, match="unscaled frequencies"):
            train(folders["unscaled"])
    else:
        assert train(folders["unscaled"]).state.global_step == 2
        assert "unscaled frequencies" in caplog.text
