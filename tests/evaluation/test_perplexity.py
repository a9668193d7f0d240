"""Perplexity by protocol equals a fresh pass of stock transformers for every window."""

import numpy as np
import pytest
import torch

from ropecli.data.documents import Document, Documents
from ropecli.errors import DataError
from ropecli.evaluation.protocols import Protocol

LENGTHS = [24, 64, 100]
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


def losses(model, window):
    """-ln p of the window's targets."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(window.ids)[None]).logits[0]
    targets = torch.from_numpy(window.ids[-window.targets :])
    first = len(window.ids) - window.targets
    return -logits[first - 1 :].double().log_softmax(-1)[torch.arange(len(targets)), targets].numpy()


@pytest.mark.parametrize("protocol", ["prefix", "tail", "sliding"])
def test_losses_equal_those_of_a_fresh_model_for_every_window(checkpoint, protocol, loaded, uneven, evaluate):
    """Also if the tables follow the length: they must not remember a longer window."""
    documents = uneven(130, 101)
    definition = Protocol(protocol).for_lengths(LENGTHS, documents.special)
    for cell in evaluate(loaded(checkpoint), documents, LENGTHS, protocol):
        sums, weights = [], []
        for document in documents.kept:
            windows = definition.windows(document, documents.special, cell.length, LENGTHS[-1])
            passes = [losses(loaded(checkpoint), window) for window in windows if window.targets]
            sums.append(sum(nll.sum() for nll in passes))
            weights.append(sum(map(len, passes)))
        np.testing.assert_allclose(cell.sums, sums, rtol=1e-4)
        assert cell.weights == tuple(weights)
        assert cell.ppl == pytest.approx(np.exp(sum(cell.sums) / sum(weights)), rel=1e-9)


def test_every_byte_of_the_scored_text_counts_once(llama, loaded, uneven, evaluate):
    documents = uneven(150, 64, 41)
    (cell,) = evaluate(loaded(llama), documents, [64], "sliding")
    text = sum(int(document.ends[-1]) for document in documents.kept)
    assert cell.bits_per_byte == pytest.approx(sum(cell.sums) / np.log(2) / text, rel=1e-9)


def test_unknown_ids_are_refused(llama, loaded, documents, evaluate):
    ids = documents.kept[0].ids.copy()
    ids[30] = 512
    foreign = Documents((Document("foreign", ids),), 0)
    with pytest.raises(DataError, match=r"id 512.*below 512"):
        evaluate(loaded(llama), foreign, [64], "prefix")
