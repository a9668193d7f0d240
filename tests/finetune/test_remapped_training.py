"""Checkpoints that carry a relative-position method are trained with it, and refused what would do without it."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ropecli.checkpoint.carrier import read_carrier
from ropecli.checkpoint.plan import make_plan
from ropecli.checkpoint.provenance import read_record
from ropecli.checkpoint.reading import open_checkpoint
from ropecli.checkpoint.writing import patch_to
from ropecli.errors import PatchError, RecipeError
from ropecli.evaluate.loading import load_model, load_tokenizer
from ropecli.finetune.adapters import attach, trainable
from ropecli.finetune.budget.compute import compute_of
from ropecli.finetune.budget.fitting import options
from ropecli.finetune.budget.ledger import Ledger
from ropecli.finetune.budget.peak import Foresight
from ropecli.finetune.budget.reading import read_config
from ropecli.finetune.loss import NextTokenLoss
from ropecli.finetune.recipe import make_recipe
from ropecli.finetune.stages import describe, plan_stages, run_stages
from ropecli.finetune.unsuitable import of_shared_sequences
from ropecli.rope import ScalingSpec

# of a Llama pretrained on 64 tokens, for 128
METHODS = {
    "rerope": {"window": 20},
    "self-extend": {"window": 12, "group": 5},
    "dual-chunk": {"chunk": 40, "local_window": 9},
    "lm-infinite": {"window": 30, "global_tokens": 3},
}
LENGTH = 100


def patched(source, output, method, factor=2.0):
    plan = make_plan(open_checkpoint(source), ScalingSpec(method, factor, METHODS.get(method, {})))
    patch_to(plan, output)
    return output


@pytest.fixture(scope="module")
def remapped(llama, tmp_path_factory):
    """remapped(method) -> the tiny Llama patched with it, for twice its window."""
    known = {}

    def get(method="rerope"):
        if method not in known:
            known[method] = patched(llama, tmp_path_factory.mktemp(method) / "patched", method)
        return known[method]

    return get


@pytest.fixture(scope="module")
def by_definition(llama, remapped):
    """by_definition(method) -> the Llama in float64 whose scores are Re Σ q·k̄·exp(iρθ), all of them at once."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    def make(method):
        remapping = read_carrier(open_checkpoint(remapped(method)).config).remapping()
        inv_freq = torch.tensor(1e4 ** -(np.arange(0, 32, 2) / 32))

        def attend(module, query, key, value, mask, scaling, **others):
            at = np.arange(query.shape[2])
            rho = torch.tensor(remapping.distances(at, at))
            key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
            back = torch.polar(torch.ones(len(at), 16, dtype=torch.float64), -torch.tensor(at)[:, None] * inv_freq)
            q, k = (torch.complex(*one.double().split(16, -1)) * back for one in (query, key))
            turns = torch.polar(torch.ones(1, dtype=torch.float64), rho.nan_to_num()[..., None] * inv_freq)
            scores = torch.einsum("bhnd,bhmd,nmd->bhnm", q, k.conj(), turns).real * scaling
            shares = scores.masked_fill(rho.isnan(), -torch.inf).softmax(-1)
            return (shares @ value.double()).to(value.dtype).transpose(1, 2), None

        AttentionInterface.register(f"by definition: {method}", attend)
        AttentionMaskInterface.register(f"by definition: {method}", lambda **others: None)
        return AutoModelForCausalLM.from_pretrained(
            llama, dtype=torch.float64, attn_implementation=f"by definition: {method}"
        ).train()

    return make


def assert_same_gradients(loss_of, expected):
    """Of a batch of two rows, to each parameter that is trained."""
    ids = torch.randint(0, 512, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    nll = loss_of(ids[:, :-1], ids[:, 1:])
    nll.backward()
    whole = cross_entropy(expected(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    whole.backward()
    assert nll.item() == pytest.approx(whole.item(), rel=1e-5)
    found = {name.removeprefix("model."): one.grad for name, one in trainable(loss_of)}
    wanted = {name: one.grad for name, one in trainable(expected)}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert gradient.norm() > 0
        assert torch.dist(found[name].double(), gradient.double()) < 1e-4 * gradient.norm(), name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_the_definition(remapped, by_definition, method, checkpointing):
    model = load_model(open_checkpoint(remapped(method)), dtype="float32", device="cpu")
    loss_of = NextTokenLoss(model).train()
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert_same_gradients(loss_of, by_definition(method))


def test_so_are_an_adapters(remapped, by_definition):
    recipe = make_recipe(None, {"data": "demo-train", "adapter": "lora"})
    models = [load_model(open_checkpoint(remapped()), dtype="float32", device="cpu"), by_definition("rerope")]
    for model in models:
        numbers = torch.Generator().manual_seed(5)
        for name, parameter in trainable(attach(model, recipe)):
            if ".lora_B." in name:  # of zeros, which leave the other matrix without a gradient
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=numbers)
    assert_same_gradients(NextTokenLoss(models[0]).train(), models[1])


@pytest.fixture(scope="module")
def whole_run(remapped, tune_into, corpus, tmp_path_factory):
    """A run with rerope, measured on the way."""
    keys = {"length": LENGTH, "eval_data": str(corpus), "eval_every": 3, "eval_documents": 3, "eval_lengths": [64, 128]}
    return tune_into(remapped(), tmp_path_factory.mktemp("runs") / "whole", **keys)


def test_a_run_that_is_stopped_and_not_measured_ends_in_the_same_bits(remapped, tune, whole_run, weights_of, metrics):
    def stop(progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(remapped(), length=LENGTH, on_step=stop)
    run = tune(remapped(), length=LENGTH, resume=True)
    assert weights_of(run) == weights_of(whole_run)
    losses = [[line["loss"] for line in metrics(one) if "loss" in line] for one in (run, whole_run)]
    assert losses[0] == losses[1]


def test_the_result_carries_the_method_on(remapped, whole_run):
    from transformers import AutoModelForCausalLM

    assert (whole_run / "config.json").read_bytes() == (remapped() / "config.json").read_bytes()
    record = read_record(whole_run)
    assert record.pop("finetuned")
    assert record == read_record(remapped())
    model = AutoModelForCausalLM.from_pretrained(whole_run)
    assert model.config._attn_implementation == "ropecli:rerope"
    ids = torch.arange(120)[None]
    with torch.no_grad():
        far = model(ids).logits
        model.set_attn_implementation("sdpa")
        assert (model(ids).logits - far).abs().max() > 1e-2 * far.abs().max()


def test_what_is_measured_on_the_way_is_what_the_result_gives(whole_run, corpus, metrics):
    from ropecli.data.documents import read_documents
    from ropecli.data.sources import read_texts
    from ropecli.evaluate.perplexity import evaluate_perplexity

    checkpoint = open_checkpoint(whole_run)
    text = read_documents(read_texts(str(corpus)), load_tokenizer(checkpoint), 128, most=3)
    rows = evaluate_perplexity(load_model(checkpoint, device="cpu"), text, (64, 128), protocol="tail")
    measured = [line["ppl"] for line in metrics(whole_run) if "ppl" in line]
    assert len(measured) == 3
    assert measured[-1] == pytest.approx({str(row.length): row.ppl for row in rows}, rel=1e-5)
    assert abs(measured[-1]["64"] / measured[-1]["128"] - 1) > 1e-3


def test_adapters_carry_it_too_for_stock_peft_and_merged(remapped, llama, tune, tmp_path):
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    from ropecli.finetune.merging import merge_to

    keys = {"length": LENGTH, "adapter": "lora", "learning_rate": 1e-2, "steps": 2}
    alone = tune(remapped(), tmp_path / "adapter", save="adapter", **keys)
    whole = tune(remapped(), tmp_path / "whole", **keys)
    merge_to(alone, tmp_path / "merged", base=str(llama))
    stock = AutoModelForCausalLM.from_pretrained(llama, config=AutoConfig.from_pretrained(alone), dtype=torch.float32)
    models = [PeftModel.from_pretrained(stock, alone).eval()]
    models += [AutoModelForCausalLM.from_pretrained(one) for one in (whole, tmp_path / "merged")]
    ids = torch.arange(120)[None]
    with torch.no_grad():
        first, *others = [model(ids).logits for model in models]
        assert (load_model(open_checkpoint(remapped()), device="cpu")(ids).logits - first).abs().max() > 1e-2
    for other in others:
        assert (other - first).abs().max() <= 1e-5 * first.abs().max()


@pytest.mark.slow
def test_two_processes_equal_one(remapped, command_line, tune, tmp_path, metrics):
    keys = {"length": LENGTH, "steps": 2, "batch_size": 1, "gradient_accumulation": 1}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ropecli"]
    arguments = command_line(remapped(), tmp_path / "two", **keys)
    done = subprocess.run([*launcher, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one = tune(remapped(), tmp_path / "one", **{**keys, "gradient_accumulation": 2})
    for name in ("loss", "grad_norm"):
        found = [[line[name] for line in metrics(run)] for run in (tmp_path / "two", one)]
        np.testing.assert_allclose(*found, rtol=1e-4)


REFUSED = [
    ({"positions": "pose", "length": 48}, "positions: pose"),
    ({"positions": "randomized", "length": 48}, "positions: randomized"),
    ({"sequences": "packed"}, "sequences: packed"),
    ({"attn": "sdpa"}, "attn: sdpa would do away with rerope"),
]


@pytest.mark.parametrize(("keys", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_what_does_not_go_with_it_is_refused_before_anything_is_written(remapped, llama, tune, tmp_path, keys, told):
    with pytest.raises(RecipeError, match=told):
        tune(remapped(), **keys)
    assert list(tmp_path.iterdir()) == []
    stages = [{"steps": 2}, {"patch": {"method": "rerope", "factor": 2}, **keys}]
    with pytest.raises(RecipeError, match=rf"(?s)stage 2 of 2.*{told}"):
        plan_stages(open_checkpoint(llama), make_recipe(None, {"data": "demo-train", "length": 128, "stages": stages}))


def test_a_dry_run_refuses_it_too_and_without_the_method_it_is_welcome(remapped, ropecli, tmp_path):
    arguments = ["finetune", remapped(), "--data", "demo-train", "--output", tmp_path / "run", "--dry-run"]
    refused = ropecli(*arguments, "--positions", "pose", "--set", "attn=eager")
    assert refused.code == 2
    assert "positions: pose" in refused.err
    assert "attn: eager" in refused.err
    assert ropecli(*arguments).code == 0
    plain = ["--set", "patch={method: yarn, factor: 2}", "--positions", "pose", "--set", "attn=eager"]
    assert ropecli(*arguments, *plain).code == 0


def test_a_stage_says_what_the_method_was_settled_to_and_warns_of_sequences_too_short_for_it(llama):
    patch = {"method": "rerope", "factor": 4}
    recipe = make_recipe(None, {"data": "demo-train", "patch": patch, "stages": [{}, {"length": 33}, {"length": 34}]})
    stages = plan_stages(open_checkpoint(llama), recipe)
    assert describe(stages)[0].startswith("stage 1 of 3: rerope ×4 (window 32) to 256 tokens")
    assert [any("too short for rerope" in line for line in one.warnings) for one in stages] == [False, True, False]


def test_an_architecture_that_does_not_allow_it_is_refused_before_the_stage_before_is_trained(build, tmp_path):
    stages = [{"steps": 1}, {"patch": {"method": "rerope", "factor": 2}}]
    recipe = make_recipe(None, {"data": "demo-train", "length": 64, "stages": stages})
    with pytest.raises(PatchError, match=r"stage 2 of 2: .*code of its own"):
        run_stages(open_checkpoint(build("falcon")), recipe, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("methods", [("rerope", "yarn"), ("yarn", "rerope")], ids=" then ".join)
def test_stages_of_both_kinds_follow_each_other(llama, corpus, tmp_path, methods):
    stages = [{"patch": {"method": method, "factor": 2, "params": METHODS.get(method, {})}} for method in methods]
    keys = {"steps": 1, "batch_size": 1, "gradient_accumulation": 1, "mixed_precision": "none", "tracker": "none"}
    recipe = make_recipe(None, {"data": str(corpus), "length": LENGTH, **keys, "stages": stages})
    run_stages(open_checkpoint(llama), recipe, tmp_path / "run")
    for number, folder in enumerate((tmp_path / "run" / "stages" / "1", tmp_path / "run")):
        alone = patched(llama, tmp_path / methods[number], methods[number])
        assert json.loads((folder / "config.json").read_text()) == json.loads((alone / "config.json").read_text())


@pytest.mark.parametrize("name", ["sp_size", "cp_size"])
def test_sequences_are_not_shared_among_processes_and_no_other_attention_is_advised(remapped, name):
    model = load_model(open_checkpoint(remapped()), device="cpu")
    recipe = make_recipe(None, {"data": "demo-train"})
    faults = list(of_shared_sequences(model, recipe, 128, name, 2, varies=False))
    assert [fault for fault in faults if "rerope" in fault and f"Take {name} 1" in fault]
    assert not any("attn" in fault or "sdpa" in fault for fault in faults)


def test_plan_foresees_the_attention_that_a_stage_will_have(llama, remapped):
    """Under torch's tensors without storage, the method's own runs; Ulysses is told off by what refuses it later."""
    recipe = make_recipe(None, {"data": "demo-train", "patch": {"method": "rerope", "factor": 2}, "length": 128})
    [stage] = plan_stages(open_checkpoint(llama), recipe)
    foresight = Foresight(read_config(open_checkpoint(llama), stage.in_effect))
    plain = Foresight(read_config(open_checkpoint(llama)))
    assert foresight.trace(recipe, 128).working > plain.trace(recipe, 128).working
    [refused] = [one.refused for one in options(foresight, recipe, 128, 2, 10**12) if one.engine == "ulysses"][:1]
    assert "rerope" in refused


def test_operations_of_what_is_masked_are_not_counted(llama, remapped):
    recipe = make_recipe(None, {"data": "demo-train"})

    def attended(folder):
        return compute_of(Foresight(read_config(open_checkpoint(folder))).anatomy, recipe, 1000, 1).attention

    assert attended(remapped("rerope")) == attended(llama)
    seen = 33  # the last 30 and the first 3
    assert attended(remapped("lm-infinite")) == pytest.approx(attended(llama) * (1 - seen / 2000) * seen / 500)


def test_checkpointing_keeps_no_more_than_of_plain_attention(remapped, llama):
    """A hidden state a layer, and nothing of what the method's attention goes through block by block."""
    kept = {}
    for folder in (llama, remapped()):
        model = load_model(open_checkpoint(folder), dtype="float32", device="cpu")
        loss_of = NextTokenLoss(model).train()
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        ids = torch.randint(0, 512, (2, 1024))
        with Ledger([*model.parameters(), *model.buffers(), ids]) as ledger:
            nll = loss_of(ids, ids)
            kept[folder] = ledger.now
        nll.backward()
    tables = 4 * 1024 * 16 * 4  # cos and sin, of queries and keys, for all layers together
    assert kept[remapped()] - tables <= 1.01 * kept[llama]
