"""Perplexity of whole documents by sliding, disjoint and yarn: a plain forward pass of stock transformers per window.

The windows are written a second time in windows_by_hand.py, and the losses worked out in float64.
"""

import numpy as np
import pytest
import torch
import windows_by_hand

from ropecli.evaluation.protocols import Protocol

BOS = 0


@pytest.fixture(scope="module")
def losses(sliding_gemma, loaded):
    """losses(ids read, ids scored) -> -ln p of each, float64."""
    model = loaded(sliding_gemma, "float64")

    @torch.no_grad()
    def score(read, scored):
        logits = model(input_ids=torch.tensor([read])).logits[0, len(read) - len(scored) :]
        return -torch.log_softmax(logits, dim=-1)[torch.arange(len(scored)), torch.tensor(scored)].numpy()

    return score


def check(cell, windows_by_document, losses):
    """cell, against the windows of each document. Σ nll / Σ tokens, each token alike."""
    found = [[losses(*window) for window in windows] for windows in windows_by_document]
    sums = [sum(nll.sum() for nll in windows) for windows in found]
    tokens = [sum(len(nll) for nll in windows) for windows in found]
    np.testing.assert_allclose(cell.sums, sums, rtol=1e-4)
    assert cell.weights == tuple(tokens)
    assert cell.tokens == sum(tokens)
    assert cell.ppl == pytest.approx(np.exp(sum(sums) / sum(tokens)), rel=1e-4)


@pytest.mark.parametrize(("prefix", "stride"), [((BOS,), None), ((BOS, 5), 7)])
def test_sliding_equals_a_pass_per_window(sliding_gemma, loaded, losses, uneven, prefix, stride, evaluate):
    documents = uneven(150, 64, 41, 3, prefix=prefix)
    cells = evaluate(loaded(sliding_gemma), documents, [24, 64, 100], Protocol("sliding", stride))
    for cell in cells:
        expected = [
            windows_by_hand.sliding(one.ids.tolist(), prefix, cell.length, stride or cell.length // 2)
            for one in documents.kept
        ]
        check(cell, expected, losses)


@pytest.mark.parametrize("prefix", [(BOS,), ()])
def test_disjoint_equals_a_pass_per_window(sliding_gemma, loaded, losses, uneven, prefix, evaluate):
    documents = uneven(150, 129, 128, 41, 3, prefix=prefix)
    cells = evaluate(loaded(sliding_gemma), documents, [24, 64, 200], "disjoint")
    for cell in cells:
        texts = [one.ids[len(prefix) :].tolist() for one in documents.kept]
        check(cell, [windows_by_hand.rolling(text, BOS, cell.length) for text in texts], losses)
        assert cell.tokens == sum(len(text) for text in texts)


def test_yarn_is_the_mean_over_windows_of_their_means(sliding_gemma, loaded, losses, uneven, evaluate):
    documents = uneven(620, 258, 41, prefix=(BOS,))
    cells = evaluate(loaded(sliding_gemma), documents, [64, 300], "yarn")
    for cell in cells:
        means = [
            [losses(*window).mean() for window in windows_by_hand.yarn_script(one.ids[1:].tolist(), BOS, cell.length)]
            for one in documents.kept
        ]
        every = [mean for own in means for mean in own]
        assert cell.ppl == pytest.approx(np.exp(np.mean(every)), rel=1e-4)
        np.testing.assert_allclose(cell.sums, [sum(own) for own in means], rtol=1e-4)
        assert cell.weights == tuple(map(len, means))
    assert cells[0].tokens < cells[1].tokens == 620 + 258 + 41 - 3


@pytest.mark.parametrize("protocol", ["sliding", "disjoint", "yarn"])
def test_every_byte_of_the_scored_text_counts_once(llama, loaded, uneven, protocol, evaluate):
    documents = uneven(150, 64, 41)
    (cell,) = evaluate(loaded(llama), documents, [64 if protocol != "yarn" else 300], protocol)
    text = sum(int(document.ends[-1]) for document in documents.kept)
    nats = sum(bucket.nll * bucket.tokens for bucket in cell.by_context)
    assert cell.bits_per_byte == pytest.approx(nats / np.log(2) / text, rel=1e-9)


def test_frequencies_follow_the_length_of_each_window(llama, patched, loaded, uneven, evaluate):
    """Tables that remember the longest window they saw would show: a fresh model for every window here."""
    folder, documents = patched(llama, "dynamic"), uneven(170, 90, 30)
    (_, cell) = evaluate(loaded(folder), documents, [24, 96], "sliding")

    def fresh(read, scored):
        with torch.no_grad():  # the model reads the last token too, and the window's length counts
            logits = loaded(folder)(input_ids=torch.tensor([[*read, scored[-1]]])).logits[0, -len(scored) - 1 : -1]
        return -torch.log_softmax(logits.double(), dim=-1)[torch.arange(len(scored)), torch.tensor(scored)].numpy()

    windows = [windows_by_hand.sliding(document.ids.tolist(), (BOS,), 96, 48) for document in documents.kept]
    check(cell, windows, fresh)
