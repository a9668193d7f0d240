"""Models that take gaps or restarts of the positions otherwise than they are meant are told from those that do not."""

import pytest
import torch

from ropecli.errors import RecipeError
from ropecli.training.loss import NextTokenLoss, prove_positions


@pytest.fixture(scope="module")
def loss_for(build):
    from transformers import AutoModelForCausalLM

    def make(name, attn="sdpa", **keys):
        model = AutoModelForCausalLM.from_pretrained(build(name, **keys), dtype=torch.float32, attn_implementation=attn)
        return NextTokenLoss(model)

    return make


@pytest.mark.parametrize(("name", "attn"), [("llama", "eager"), ("gpt_neox", "sdpa"), ("mixtral", "sdpa")])
def test_models_that_do_as_they_should_pass(loss_for, name, attn):
    keys = {"llama": {"attention_dropout": 0.5}, "mixtral": {"head_dim": 32}}
    loss_of = loss_for(name, attn, **keys.get(name, {}))
    loss_of.train()
    state = torch.get_rng_state()
    for positions, packed in (("pose", False), ("randomized", False), ("full", True)):
        prove_positions(loss_of, positions, packed)
    assert loss_of.training
    assert loss_of.model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_lets_packed_documents_see_one_another_is_refused(loss_for):
    loss_of = loss_for("falcon")
    prove_positions(loss_of, "pose", packed=False)
    with pytest.raises(RecipeError, match="attend to one another"):
        prove_positions(loss_of, "full", packed=True)


def test_a_model_that_takes_gaps_for_borders_is_refused(loss_for, monkeypatch):
    """As every model would, were transformers not given a mask."""
    loss_of = loss_for("llama")
    plain = loss_of._split.decode
    monkeypatch.setattr(loss_of._split, "decode", lambda ids, attention_mask=None, **others: plain(ids, **others))
    with pytest.raises(RecipeError, match="border of a document"):
        prove_positions(loss_of, "pose", packed=False)


def test_a_model_that_passes_over_its_positions_is_refused(loss_for, monkeypatch):
    loss_of = loss_for("llama")
    plain = loss_of._split.decode
    monkeypatch.setattr(loss_of._split, "decode", lambda ids, **others: plain(ids))
    with pytest.raises(RecipeError, match="does not follow the positions"):
        prove_positions(loss_of, "randomized", packed=False)
