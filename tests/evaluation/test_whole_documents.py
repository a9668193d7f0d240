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
def test_the_text_that_is_scored_is_counted_in_bytes(llama, loaded, uneven, protocol, evaluate):
    """Every byte once: of what the prefix stands for there is none, and sliding's first token is not scored."""
    documents = uneven(150, 64, 41)
    (cell,) = evaluate(loaded(llama), documents, [64 if protocol != "yarn" else 300], protocol)
    text = sum(int(one.ends[-1]) for one in documents.kept)
    nats = cell.value * cell.tokens if protocol != "yarn" else sum(one.nll * one.tokens for one in cell.by_context)
    assert cell.bits_per_byte == pytest.approx(nats / np.log(2) / text, rel=1e-9)
    without = uneven(150, 64, 41, prefix=())
    (cell,) = evaluate(loaded(llama), without, [64], "sliding")
    text = sum(int(one.ends[-1] - one.ends[0]) for one in without.kept)
    assert cell.bits_per_byte == pytest.approx(cell.value * cell.tokens / np.log(2) / text, rel=1e-9)


@pytest.mark.parametrize(("method", "protocol"), [("dynamic", "sliding"), ("longrope", "disjoint")])
def test_frequencies_that_follow_the_length_follow_each_windows(
    llama, patched, loaded, uneven, method, protocol, evaluate
):
    """Tables that remember the longest window they saw would show: a fresh model for every window here."""
    ones = np.linspace(1, 6, 16).tolist()
    params = {"long_factor": ones, "short_factor": ones[::-1]} if method == "longrope" else {}
    folder = patched(llama, method, **params)
    documents = uneven(170, 90, 30)
    (_, cell) = evaluate(loaded(folder), documents, [24, 96], protocol)

    def fresh(read, scored):
        with torch.no_grad():
            # reads_last: sliding gives the model the last token too, and its window's length counts
            ids = torch.tensor([[*read, scored[-1]] if protocol == "sliding" else read])
            logits = loaded(folder)(input_ids=ids).logits[0, len(read) - len(scored) : len(read)]
        return -torch.log_softmax(logits.double(), dim=-1)[torch.arange(len(scored)), torch.tensor(scored)].numpy()

    if protocol == "sliding":
        expected = [windows_by_hand.sliding(one.ids.tolist(), (BOS,), 96, 48) for one in documents.kept]
    else:
        expected = [windows_by_hand.rolling(one.ids[1:].tolist(), BOS, 96) for one in documents.kept]
    check(cell, expected, fresh)
