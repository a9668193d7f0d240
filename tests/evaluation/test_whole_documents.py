"""Perplexity of whole documents by sliding, disjoint and yarn: a plain forward pass of stock transformers per window.

The windows are written a second time in windows_by_hand.py, and the losses worked out in float64.
"""

import numpy as np
import pytest
import torch
import windows_by_hand

from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.evaluation.protocols import Protocol

BOS = 0


@pytest.fixture(scope="module")
def checkpoint(sliding_gemma):
    return sliding_gemma


@pytest.fixture(scope="module")
def losses(checkpoint, precise):
    """losses(ids read, ids scored) -> -ln p of each, float64."""
    model = precise(checkpoint)

    @torch.no_grad()
    def score(read, scored):
        logits = model(input_ids=torch.tensor([read])).logits[0, len(read) - len(scored) :]
        return -torch.log_softmax(logits, dim=-1)[torch.arange(len(scored)), torch.tensor(scored)].numpy()

    return score


def check(row, windows_by_document, losses):
    """row, against the windows of each document. Σ nll / Σ tokens, each token alike."""
    found = [[losses(*window) for window in windows] for windows in windows_by_document]
    sums = [sum(nll.sum() for nll in windows) for windows in found]
    tokens = [sum(len(nll) for nll in windows) for windows in found]
    np.testing.assert_allclose(row.document_nll, sums, rtol=1e-4)
    assert row.document_weights == tuple(tokens)
    assert row.tokens == sum(tokens)
    assert row.ppl == pytest.approx(np.exp(sum(sums) / sum(tokens)), rel=1e-4)


@pytest.mark.parametrize(("prefix", "stride"), [((BOS,), None), ((BOS, 5), 7)])
def test_sliding_equals_a_pass_per_window(checkpoint, loaded, losses, uneven, prefix, stride):
    documents = uneven(150, 64, 41, 3, prefix=prefix)
    rows = evaluate_perplexity(loaded(checkpoint), documents, [24, 64, 100], protocol=Protocol("sliding", stride))
    for row in rows:
        expected = [
            windows_by_hand.sliding(one.ids.tolist(), prefix, row.length, stride or row.length // 2)
            for one in documents.kept
        ]
        check(row, expected, losses)


@pytest.mark.parametrize("prefix", [(BOS,), ()])
def test_disjoint_equals_a_pass_per_window(checkpoint, loaded, losses, uneven, prefix):
    documents = uneven(150, 129, 128, 41, 3, prefix=prefix)
    rows = evaluate_perplexity(loaded(checkpoint), documents, [24, 64, 200], protocol="disjoint")
    for row in rows:
        texts = [one.ids[len(prefix) :].tolist() for one in documents.kept]
        check(row, [windows_by_hand.rolling(text, BOS, row.length) for text in texts], losses)
        assert row.tokens == sum(len(text) for text in texts)


def test_yarn_is_the_mean_over_windows_of_their_means(checkpoint, loaded, losses, uneven):
    documents = uneven(620, 258, 41, prefix=(BOS,))
    rows = evaluate_perplexity(loaded(checkpoint), documents, [64, 300], protocol="yarn")
    for row in rows:
        means = [
            [losses(*window).mean() for window in windows_by_hand.yarn_script(one.ids[1:].tolist(), BOS, row.length)]
            for one in documents.kept
        ]
        every = [mean for own in means for mean in own]
        assert row.ppl == pytest.approx(np.exp(np.mean(every)), rel=1e-4)
        np.testing.assert_allclose(row.document_nll, [sum(own) for own in means], rtol=1e-4)
        assert row.document_weights == tuple(map(len, means))
    assert rows[0].tokens < rows[1].tokens == 620 + 258 + 41 - 3


def test_sliding_is_the_strided_loop_of_transformers_documentation(llama, loaded, uneven):
    """huggingface.co/docs/transformers/perplexity, but for its count of tokens: it takes one from every window, and
    only the first loses one by the shift of labels."""
    (document,) = uneven(200, prefix=()).kept
    model, max_length, stride = loaded(llama), 64, 24
    input_ids = torch.from_numpy(document.ids)[None]
    nll_sum, n_tokens, prev_end_loc = 0.0, 0, 0
    for begin_loc in range(0, 200, stride):
        end_loc = min(begin_loc + max_length, 200)
        trg_len = end_loc - prev_end_loc
        window = input_ids[:, begin_loc:end_loc]
        target_ids = window.clone()
        target_ids[:, :-trg_len] = -100
        with torch.no_grad():
            neg_log_likelihood = model(window, labels=target_ids).loss
        scored = int((target_ids[:, 1:] != -100).sum())
        nll_sum, n_tokens = nll_sum + neg_log_likelihood.item() * scored, n_tokens + scored
        prev_end_loc = end_loc
        if end_loc == 200:
            break
    documents = uneven(200, prefix=())
    (row,) = evaluate_perplexity(model, documents, [max_length], protocol=Protocol("sliding", stride))
    assert row.tokens == n_tokens == 199
    assert row.ppl == pytest.approx(np.exp(nll_sum / n_tokens), rel=1e-4)


@pytest.mark.parametrize("protocol", ["sliding", "disjoint", "yarn"])
def test_the_text_that_is_scored_is_counted_in_bytes(llama, loaded, uneven, protocol):
    """Every byte once: of what the prefix stands for there is none, and sliding's first token is not scored."""
    documents = uneven(150, 64, 41)
    (row,) = evaluate_perplexity(loaded(llama), documents, [64 if protocol != "yarn" else 300], protocol=protocol)
    text = sum(int(one.ends[-1]) for one in documents.kept)
    nats = row.nll * row.tokens if protocol != "yarn" else sum(one.nll * one.tokens for one in row.by_context)
    assert row.bits_per_byte == pytest.approx(nats / np.log(2) / text, rel=1e-9)
    without = uneven(150, 64, 41, prefix=())
    (row,) = evaluate_perplexity(loaded(llama), without, [64], protocol="sliding")
    text = sum(int(one.ends[-1] - one.ends[0]) for one in without.kept)
    assert row.bits_per_byte == pytest.approx(row.nll * row.tokens / np.log(2) / text, rel=1e-9)


@pytest.mark.parametrize(("method", "protocol"), [("dynamic", "sliding"), ("longrope", "disjoint")])
def test_frequencies_that_follow_the_length_follow_each_windows(llama, patched, loaded, uneven, method, protocol):
    """Tables that remember the longest window they saw would show: a fresh model for every window here."""
    ones = np.linspace(1, 6, 16).tolist()
    params = {"long_factor": ones, "short_factor": ones[::-1]} if method == "longrope" else {}
    folder = patched(llama, method, **params)
    documents = uneven(170, 90, 30)
    (_, row) = evaluate_perplexity(loaded(folder), documents, [24, 96], protocol=protocol)

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
    check(row, expected, fresh)
