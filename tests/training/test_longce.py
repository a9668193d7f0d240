"""LongCE against a computation that reads every token twice on its own; which runs can use it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from ropecli.data.sequences import UNSCORED
from ropecli.errors import RopecliError
from ropecli.evaluation.protocols import ShortContext
from ropecli.training import loss as loss_module
from ropecli.training.loss import LongContextLoss, NextTokenLoss

IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 512, (2, 61)))
SHORT = ShortContext(5, 3)


@pytest.fixture(scope="module")
def model(build):
    """Its head caps the logits."""
    from transformers import AutoModelForCausalLM

    folder = build("gemma2", head_dim=32, final_logit_softcapping=20.0)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()


def brute_force(model, ids, labels, counts, cap, begins=(0,)):
    """(plain loss, weighted loss, weights): one short pass for every token. begins: of packed documents."""

    def losses(ids, labels):
        logits = model(input_ids=ids).logits
        return cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=UNSCORED)

    borders = [*begins, ids.shape[1]]
    plain = torch.cat([losses(ids[:, a:b], labels[:, a:b]) for a, b in pairwise(borders)], dim=1)
    weights = torch.ones_like(plain)
    for position in range(SHORT.tokens, ids.shape[1]):
        start = (position - SHORT.tokens) // SHORT.stride * SHORT.stride
        if max(begin for begin in begins if begin < position) >= max(start, 1):
            continue
        with torch.no_grad():
            short = losses(ids[:, start:position], labels[:, start:position])[:, -1]
        gain = short - plain[:, position - 1].detach()
        weights[:, position - 1] = gain.exp().clamp(max=cap)
    return plain.sum(), (weights * plain / counts).sum(), weights


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    ("by_document", "cap", "begins"),
    [(False, 5.0, (0,)), (True, 1.5, (0,)), (False, 2.0, (0, 7, 9, 40)), (True, 3.0, (0, 31))],
    ids=["whole", "weights by document", "packed", "packed, weights by document"],
)
def test_value_and_gradient_are_those_of_brute_force(model, by_document, cap, begins, monkeypatch):
    monkeypatch.setattr(loss_module, "_CHUNK", 14)
    labels = torch.nn.functional.pad(IDS[:, 1:], (0, 1), value=UNSCORED)
    labels[0, 40:45] = UNSCORED
    labels[:, [begin - 1 for begin in begins[1:]]] = UNSCORED
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise([*begins, 61])]).expand_as(IDS)
    packed = {"positions": positions, "packed": True} if len(begins) > 1 else {}
    counts = torch.tensor([4, 9])[(torch.arange(61) > 20).long()].expand_as(IDS) if by_document else None
    plain, weighted, weights = brute_force(model, IDS, labels, 1 if counts is None else counts, cap, begins)
    assert weights.max() == cap > 1 > weights.min()
    model.zero_grad()
    weighted.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss_of = LongContextLoss(model, SHORT, cap)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        loss = loss_of(IDS, labels, document_labels=counts, **packed)
        loss.backward()
    finally:
        model.gradient_checkpointing_disable()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        # logits are float32
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)
        assert expected[name].abs().max() > 1e-3
    with torch.no_grad():
        assert loss_of(IDS, labels, **packed).item() == NextTokenLoss(model)(IDS, labels, **packed).item()


WRONG = {
    "gaps": ({"positions": "pose"}, "cannot be combined"),
    "short sequences": ({"length": 80}, "--length is 80; loss: longce needs more than 80"),
}


@pytest.mark.parametrize(("keys", "message"), WRONG.values(), ids=WRONG)
def test_settings_that_longce_does_not_support_are_refused(tune, patched_llama, keys, message):
    with pytest.raises(RopecliError, match=message):
        tune(patched_llama, **{"length": 96, "loss": "longce", **keys})
