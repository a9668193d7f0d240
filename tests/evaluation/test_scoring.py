"""TokenScorer leaves the model unchanged and refuses unsupported heads; test_chunks.py compares its losses."""

import numpy as np
import pytest
import torch

from ropecli.errors import CheckpointError
from ropecli.evaluation.scoring import TokenScorer

IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 512, (2, 70)))


def expected(model, plain_nll, ids=IDS):
    return np.stack([plain_nll(model, row) for row in ids])


def test_the_model_is_left_as_it_was(llama, loaded):
    model = loaded(llama)
    before = model(input_ids=IDS).logits
    scorer = TokenScorer(model)
    scorer(IDS)
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_cannot_be_split_is_refused(llama, loaded):
    model = loaded(llama)
    whole = model.forward

    def forward(input_ids, **arguments):
        outputs = whole(input_ids=input_ids, **arguments)
        # a head that looks at the tokens themselves
        outputs.logits = outputs.logits + input_ids[..., None] * torch.arange(512)
        return outputs

    model.forward = forward
    with pytest.raises(CheckpointError, match="LM head cannot run separately"):
        TokenScorer(model)


def test_a_type_whose_base_model_is_itself_is_scored_all_the_same(build, loaded, plain_nll):
    """Llama 4's text model names its decoder otherwise than its base_model_prefix says."""
    model = loaded(build("llama4_text", head_dim=32, intermediate_size_mlp=96, num_local_experts=2))
    np.testing.assert_allclose(TokenScorer(model)(IDS).numpy(), expected(model, plain_nll), rtol=0, atol=1e-5)
