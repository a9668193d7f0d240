"""Perplexity by protocol equals a brute force that runs stock transformers once for every number."""

import numpy as np
import pytest
import torch

from ropecli.data.documents import Document, Documents, SpecialTokens
from ropecli.errors import DataError, RopecliError
from ropecli.evaluation.perplexity import count_passes, evaluate_perplexity
from ropecli.evaluation.protocol_descriptions import PROTOCOLS
from ropecli.evaluation.protocols import Protocol

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


def test_prefix_equals_a_fresh_pass_for_every_length(checkpoint, loaded, documents, brute_force):
    rows = evaluate_perplexity(loaded(checkpoint), documents, LENGTHS)
    assert [row.length for row in rows] == LENGTHS
    for row in rows:
        ppl, document_nll = brute_force(checkpoint, row.length, "prefix")
        np.testing.assert_allclose(row.ppl, ppl, rtol=1e-4)
        np.testing.assert_allclose(row.document_nll, document_nll, rtol=1e-4)
        assert (row.tokens, row.documents) == (4 * (row.length - 1), 4)


def test_tail_scores_the_same_tokens_with_more_context(checkpoint, loaded, documents, brute_force):
    rows = evaluate_perplexity(loaded(checkpoint), documents, LENGTHS, protocol=Protocol("tail"))
    for row in rows:
        ppl, document_nll = brute_force(checkpoint, row.length, "tail", longest=200, targets=12)
        np.testing.assert_allclose(row.ppl, ppl, rtol=1e-4)
        np.testing.assert_allclose(row.document_nll, document_nll, rtol=1e-4)
        assert row.tokens == 4 * 12


@pytest.mark.parametrize(
    ("method", "protocol", "expected"),
    [
        ("yarn", "prefix", [200] * 4),
        ("yarn", "tail", [24, 65, 200] * 4),
        ("dynamic", "prefix", [24, 65, 200] * 4),
    ],
)
def test_no_more_passes_than_needed(llama, patched, loaded, documents, method, protocol, expected):
    model = loaded(patched(llama, method))
    seen, advances = [], []
    # the first layer, since the head is applied through the model's own forward
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].shape[1]))
    evaluate_perplexity(model, documents, [24, 65, 200], protocol=protocol, advance=lambda: advances.append(1))
    passes = [length for length in seen if length in (24, 65, 200)]  # others: SplitModel's probe of 16 tokens
    assert passes == expected
    assert len(seen) - len(passes) <= 2
    assert len(advances) == count_passes([24, 65, 200], 4, Protocol(protocol), method == "dynamic") == len(expected)


def test_documents_that_are_shorter_than_asked_are_refused(llama, loaded, documents):
    for protocol in ("prefix", "tail"):
        with pytest.raises(DataError, match="the longest length is 100000"):
            evaluate_perplexity(loaded(llama), documents, [24, 100_000], protocol=protocol)


def test_token_ids_beyond_the_vocabulary_are_refused(llama, loaded, documents):
    ids = documents.kept[0].ids.copy()
    ids[30] = 512
    foreign = Documents((Document("foreign", ids),), 0)
    for protocol in ("prefix", "sliding"):
        with pytest.raises(DataError, match=r"id 512.*below 512"):
            evaluate_perplexity(loaded(llama), foreign, [24, 64], protocol=protocol)


def test_a_loss_that_is_not_finite_is_an_error(llama, loaded, uneven):
    model = loaded(llama)
    with torch.no_grad():
        model.model.norm.weight.mul_(float("nan"))
    for protocol in PROTOCOLS:
        with pytest.raises(RopecliError, match=r"not finite at length 24 in text00\.txt and 3 more"):
            evaluate_perplexity(model, uneven(60, 50, 40, 30), [24], protocol=protocol)


def test_a_token_that_the_protocol_inserts_must_be_known_too(llama, loaded, documents):
    foreign = Documents(documents.kept, 0, SpecialTokens((), bos=700))
    for protocol in ("disjoint", "yarn"):
        with pytest.raises(DataError, match=r"id 700.*below 512"):
            evaluate_perplexity(loaded(llama), foreign, [300], protocol=protocol)


def test_yarn_says_where_it_skips_tokens(llama, loaded, documents):
    said = []
    evaluate_perplexity(loaded(llama), documents, [24, 300], protocol="yarn", say=said.append)
    assert [sentence for sentence in said if "24 tokens" in sentence and "skips" in sentence]
    said.clear()
    evaluate_perplexity(loaded(llama), documents, [300], protocol="yarn", say=said.append)
    assert not said
