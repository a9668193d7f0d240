"""The chunked loss equals a plain cross entropy; models that misread positions are refused."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ropecli.errors import RecipeError
from ropecli.training import loss as loss_module
from ropecli.training.loss import NextTokenLoss, prove_positions

ARCHITECTURES = {
    "llama": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 32, "final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
}
IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 512, (3, 90)))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request, build):
    from transformers import AutoModelForCausalLM

    folder = build(request.param, **ARCHITECTURES[request.param])
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def mean(loss_of):
    """The loss of a module that sums over labels, per token, on ids alone."""

    def of(ids):
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        return loss_of(ids, labels) / ids[:, 1:].numel()

    return of


def loss_and_gradients(model, loss_of):
    model.zero_grad()
    loss = loss_of(IDS)
    loss.backward()
    return loss.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def plain(model):
    """As anybody would write it."""
    return lambda ids: cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("chunk", "checkpointing", "old_torch"),
    [(7, True, False), pytest.param(7, True, True, id="torch 2.11")],
)
def test_loss_and_gradients_are_those_of_a_plain_cross_entropy(model, checkpointing, chunk, old_torch, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK", chunk)
    if old_torch:  # it lacks both
        monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
        monkeypatch.delattr(torch.nn.functional, "linear_cross_entropy", raising=False)
    loss, gradients = loss_and_gradients(model, plain(model))
    chunked = NextTokenLoss(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        ours, our_gradients = loss_and_gradients(model, mean(chunked))
    finally:
        model.gradient_checkpointing_disable()
    assert ours == pytest.approx(loss, abs=1e-4)
    assert our_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-4, atol=1e-6)
        assert gradient.abs().max() > 1e-5  # else the line above holds nothing


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_offloaded_activations_give_the_same_gradients_and_are_one_hidden_state_per_layer(model, monkeypatch):
    kept = []

    class Elsewhere(torch.autograd.graph.saved_tensors_hooks):
        """Stands in for the GPU's copies, which a CPU does not make."""

        def __init__(self, pin_memory):
            super().__init__(lambda tensor: kept.append(tensor.shape) or tensor.clone(), lambda tensor: tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Elsewhere)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        loss, gradients = loss_and_gradients(model, mean(NextTokenLoss(model)))
        assert kept == []
        ours, our_gradients = loss_and_gradients(model, mean(NextTokenLoss(model, offload=True)))
    finally:
        model.gradient_checkpointing_disable()
    assert ours == loss
    assert all(torch.equal(our_gradients[name], gradient) for name, gradient in gradients.items())
    layers, hidden = model.config.num_hidden_layers, (*IDS.shape, model.config.hidden_size)
    assert layers <= kept.count(hidden) <= layers + 4  # and what the embedding and the last norm save
    assert max(shape.numel() for shape in kept if len(shape) > 2) == torch.Size(hidden).numel()


@pytest.fixture(scope="module")
def loss_for(build):
    from transformers import AutoModelForCausalLM

    def make(name, attn="sdpa", **keys):
        model = AutoModelForCausalLM.from_pretrained(build(name, **keys), dtype=torch.float32, attn_implementation=attn)
        return NextTokenLoss(model)

    return make


@pytest.mark.parametrize(("name", "attn"), [("llama", "eager"), ("gpt_neox", "sdpa"), ("mixtral", "sdpa")])
def test_models_that_follow_positions_pass(loss_for, name, attn):
    keys = {"llama": {"attention_dropout": 0.5}, "mixtral": {"head_dim": 32}}
    loss_of = loss_for(name, attn, **keys.get(name, {}))
    loss_of.train()
    state = torch.get_rng_state()
    for positions, packed in (("pose", False), ("randomized", False), ("full", True)):
        prove_positions(loss_of, positions, packed)
    assert loss_of.training
    assert loss_of.model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_model_that_lets_packed_documents_attend_to_one_another_is_refused(loss_for):
    loss_of = loss_for("falcon")
    prove_positions(loss_of, "pose", packed=False)
    with pytest.raises(RecipeError, match="attend to one another"):
        prove_positions(loss_of, "full", packed=True)


@pytest.mark.parametrize(
    ("dropped", "positions", "message"),
    [
        (("attention_mask",), "pose", "document boundaries"),
        (("attention_mask", "position_ids"), "randomized", "ignores position_ids"),
    ],
)
def test_model_that_misreads_gaps_is_refused(loss_for, monkeypatch, dropped, positions, message):
    loss_of = loss_for("llama")
    plain = loss_of.split.decode

    def decode(ids, **inputs):
        return plain(ids, **{name: value for name, value in inputs.items() if name not in dropped})

    monkeypatch.setattr(loss_of.split, "decode", decode)
    with pytest.raises(RecipeError, match=message):
        prove_positions(loss_of, positions, packed=False)
