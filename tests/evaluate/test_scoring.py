"""TokenScorer gives what a plain forward pass and a log-softmax give, whatever an architecture does to its logits."""

import numpy as np
import pytest
import torch

from ropecli.errors import CheckpointError
from ropecli.evaluate import scoring
from ropecli.evaluate.scoring import TokenScorer

ARCHITECTURES = {
    "llama": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "final_logit_softcapping": 5.0},
    "cohere": {"logit_scale": 0.25},
    "gpt_neox": {},
    "qwen2": {"tie_word_embeddings": True},
}
IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 512, (2, 70)))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request, build, loaded):
    return loaded(build(request.param, **ARCHITECTURES[request.param]))


def expected(model, plain_nll, ids=IDS):
    return np.stack([plain_nll(model, row) for row in ids])


def test_every_token_scores_as_in_a_plain_forward_pass_however_many_logits_are_made_at_once(
    model, plain_nll, monkeypatch
):
    scorer, wanted = TokenScorer(model), expected(model, plain_nll)
    for tokens_at_once in (None, 0, 1, 7, 69):
        if tokens_at_once is not None:
            monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", tokens_at_once * 512 * len(IDS))
        scores = scorer(IDS)
        assert scores.shape == (2, 69)
        np.testing.assert_allclose(scores.numpy(), wanted, rtol=0, atol=1e-5)
    two = expected(model, plain_nll, IDS[:, :2])
    np.testing.assert_allclose(scorer(IDS[:, :2]).numpy(), two, rtol=0, atol=1e-5)


def test_the_model_is_left_as_it_was(model):
    before = model(input_ids=IDS).logits
    scorer = TokenScorer(model)
    scorer(IDS)
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_does_not_come_apart_is_refused(llama, loaded):
    model = loaded(llama)
    whole = model.forward

    def forward(input_ids, **arguments):
        outputs = whole(input_ids=input_ids, **arguments)
        # a head that looks at the tokens themselves
        outputs.logits = outputs.logits + input_ids[..., None] * torch.arange(512)
        return outputs

    model.forward = forward
    with pytest.raises(CheckpointError, match="does not let its head run apart"):
        TokenScorer(model)


def test_a_type_whose_base_model_is_itself_is_scored_all_the_same(build, loaded, plain_nll):
    """Llama 4's text model names its decoder otherwise than its base_model_prefix says."""
    model = loaded(build("llama4_text", head_dim=32, intermediate_size_mlp=96, num_local_experts=2))
    np.testing.assert_allclose(TokenScorer(model)(IDS).numpy(), expected(model, plain_nll), rtol=0, atol=1e-5)
