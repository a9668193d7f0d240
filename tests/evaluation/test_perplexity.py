"""Perplexity by protocol equals a brute force that runs stock transformers once for every number."""

import numpy as np
import pytest
import torch

from ropecli.data.documents import Document, Documents, SpecialTokens
from ropecli.errors import DataError, RopecliError
from ropecli.evaluation.protocols import PROTOCOLS
from ropecli.evaluation.tasks.perplexity import Perplexity

LENGTHS = [24, 64, 65, 200]
LONGROPE = {"long_factor": np.linspace(1, 6, 16).tolist(), "short_factor": np.linspace(1, 1.5, 16).tolist()}


@pytest.fixture(scope="module", params=["gemma2", "yarn", "nested dynamic", "longrope"])
def checkpoint(request, llama, build, patched):
    match request.param:
        case "gemma2":
            return build("gemma2", head_dim=32, final_logit_softcapping=5.0)
        case "nested dynamic":
            layers = ["sliding_attention", "full_attention"]
            return patched(build("gemma3_text", head_dim=32, layer_types=layers, query_pre_attn_scalar=4), "dynamic")
        case "longrope":
            return patched(llama, "longrope", **LONGROPE)
    return patched(llama, request.param)


@pytest.mark.parametrize("protocol", ["prefix", "tail"])
def test_losses_equal_those_of_a_fresh_pass_for_every_length(
    checkpoint, protocol, loaded, documents, brute_force, evaluate
):
    cells = evaluate(loaded(checkpoint), documents, LENGTHS, protocol)
    assert [cell.length for cell in cells] == LENGTHS
    for cell in cells:
        ppl, document_nll = brute_force(checkpoint, cell.length, protocol, longest=200, targets=12)
        np.testing.assert_allclose(cell.ppl, ppl, rtol=1e-4)
        np.testing.assert_allclose(cell.sums, document_nll, rtol=1e-4)
        assert (cell.tokens, cell.samples) == (4 * (12 if protocol == "tail" else cell.length - 1), 4)


def test_a_loss_that_is_not_finite_is_an_error(llama, loaded, uneven, evaluate):
    model = loaded(llama)
    with torch.no_grad():
        model.model.norm.weight.mul_(float("nan"))
    for protocol in PROTOCOLS:
        with pytest.raises(RopecliError, match=r"not finite at length 24 in text00\.txt and 3 more"):
            evaluate(model, uneven(60, 50, 40, 30), [24], protocol)


def test_unknown_ids_and_short_documents_are_refused(llama, loaded, documents, evaluate):
    with pytest.raises(DataError, match="the longest length is 100000"):
        Perplexity(documents, [24, 100_000], "tail")
    ids = documents.kept[0].ids.copy()
    ids[30] = 512
    foreign = Documents((Document("foreign", ids),), 0)
    inserted = Documents(documents.kept, 0, SpecialTokens((), bos=700))
    for unknown, protocol, number in ((foreign, "prefix", 512), (inserted, "disjoint", 700)):
        with pytest.raises(DataError, match=rf"id {number}.*below 512"):
            evaluate(loaded(llama), unknown, [64], protocol)


def test_yarn_says_where_it_skips_tokens(documents, caplog):
    Perplexity(documents, [300], "yarn")
    assert not caplog.records
    Perplexity(documents, [24, 300], "yarn")
    (sentence,) = caplog.messages
    assert "24 tokens" in sentence
    assert "skips" in sentence
