"""Checkpoints that carry a relative-position method are trained with it, and refused what would do without it."""

import functools

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ropecli.attention.patching import patch_to
from ropecli.checkpoint.files import read_record
from ropecli.checkpoint.opening import open_checkpoint
from ropecli.checkpoint.patch_plan import make_plan
from ropecli.config.saved_remapping import read_saved_remapping
from ropecli.errors import RecipeError
from ropecli.live.loading import load_model
from ropecli.scaling.spec import make_spec
from ropecli.training.adapters import trainable
from ropecli.training.loss import NextTokenLoss
from ropecli.training.recipe_schema import make_recipe
from ropecli.training.stages import plan_stages

# of a Llama pretrained on 64 tokens, for 128
METHODS = {
    "rerope": {"window": 20},
    "dual-chunk": {"chunk": 40, "local_window": 9},
    "lm-infinite": {"window": 30, "global_tokens": 3},
}
LENGTH = 100


@pytest.fixture(scope="module")
def remapped(llama, tmp_path_factory):
    """remapped(method) -> the tiny Llama patched with it, for twice its window."""

    @functools.cache
    def get(method="rerope"):
        output = tmp_path_factory.mktemp(method) / "patched"
        patch_to(make_plan(open_checkpoint(llama), make_spec(method, 2.0, METHODS[method])), output)
        return output

    return get


@pytest.fixture(scope="module")
def by_definition(llama, remapped):
    """by_definition(method) -> the Llama in float64 whose scores are Re Σ q·k̄·exp(iρθ), all of them at once."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    def make(method):
        remapping = read_saved_remapping(open_checkpoint(remapped(method)).config).remapping()
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
    """The gradients of a batch of two rows, to each parameter that is trained."""
    ids = torch.randint(0, 512, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    nll = loss_of(ids[:, :-1], ids[:, 1:])
    nll.backward()
    whole = cross_entropy(expected(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    whole.backward()
    assert nll.item() == pytest.approx(whole.item(), rel=1e-5)
    gradients = {name.removeprefix("model."): parameter.grad for name, parameter in trainable(loss_of)}
    for name, parameter in trainable(expected):
        assert parameter.grad.norm() > 0
        assert torch.dist(gradients[name].double(), parameter.grad.double()) < 1e-4 * parameter.grad.norm(), name


@pytest.mark.parametrize(("method", "checkpointing"), [("rerope", True), ("dual-chunk", False), ("lm-infinite", False)])
def test_gradients_are_those_of_the_definition(remapped, by_definition, method, checkpointing):
    model = load_model(open_checkpoint(remapped(method)), dtype="float32", device="cpu")
    loss_of = NextTokenLoss(model).train()
    if checkpointing:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert_same_gradients(loss_of, by_definition(method))


def test_result_has_the_method(remapped, tune, corpus):
    from transformers import AutoModelForCausalLM

    measured = {"eval_data": str(corpus), "eval_every": 3, "eval_documents": 3, "eval_lengths": [64, 128]}
    whole_run = tune(remapped(), length=LENGTH, **measured)
    assert (whole_run / "config.json").read_bytes() == (remapped() / "config.json").read_bytes()
    record = read_record(whole_run)
    assert record.pop("finetuned")
    assert record.pop("trained_after_patch")
    assert record == read_record(remapped())
    model = AutoModelForCausalLM.from_pretrained(whole_run)
    assert model.config._attn_implementation == "ropecli:rerope"
    ids = torch.arange(120)[None]
    with torch.no_grad():
        far = model(ids).logits
        model.set_attn_implementation("sdpa")
        assert (model(ids).logits - far).abs().max() > 1e-2 * far.abs().max()


def test_adapter_of_a_distance_method_works_in_stock_peft_and_merged(remapped, llama, tune, tmp_path):
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    from ropecli.training.finished_weights import merge_to

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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"positions": "pose", "length": 48}, "--positions pose"),
        ({"sequences": "packed"}, "--sequences packed"),
        ({"attn": "sdpa"}, "attn: sdpa would replace rerope"),
    ],
)
def test_settings_that_break_a_distance_method_are_refused(remapped, llama, tune, tmp_path, keys, message):
    with pytest.raises(RecipeError, match=message):
        tune(remapped(), **keys)
    assert list(tmp_path.iterdir()) == []
    stages = [{"steps": 2}, {"patch": {"method": "rerope", "factor": 2}, **keys}]
    with pytest.raises(RecipeError, match=rf"(?s)stage 2 of 2.*{message}"):
        plan_stages(open_checkpoint(llama), make_recipe(None, {"data": "demo-train", "length": 128, "stages": stages}))
