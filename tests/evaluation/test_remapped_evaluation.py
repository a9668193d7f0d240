"""Evaluations of relative-position methods: written or in memory, at once or in pieces, they are what a loop gives."""

import itertools
import json

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface

LENGTHS = [24, 64, 130]
METHODS = ["rerope", "self-extend"]


def distance(method, n, m):
    """For a pretraining length of 64 and a target of 256 tokens, by what the papers say."""
    if method == "rerope":
        return min(n - m, 32)
    window, group = 16, 16  # 2·(256 - 16) / (64 - 2·16), and one more
    return n - m if n - m < window else n // group - m // group + window - window // group


def attend_by_hand(method):
    """Attention in float64 with one matrix of scores; heads of 32 turn by 10000^(-2i/32), i and i + 16 together."""
    turns = 10_000.0 ** -(torch.arange(16, dtype=torch.float64) / 16)

    def attend(module, query, key, value, attention_mask, scaling, **others):
        at = range(query.shape[2])
        own = torch.polar(torch.ones(len(at), 16, dtype=torch.float64), -torch.tensor(at)[:, None] * turns)
        rho = torch.tensor([[float(distance(method, n, m)) for m in at] for n in at], dtype=torch.float64)
        further = torch.polar(torch.ones_like(rho[..., None] * turns), rho[..., None] * turns)
        groups = query.shape[1] // key.shape[1]
        q, k = (torch.complex(*one.double().chunk(2, -1)) * own for one in (query, key.repeat_interleave(groups, 1)))
        scores = torch.einsum("bhni,bhmi,nmi->bhnm", q, k.conj(), further).real * scaling
        scores = scores.masked_fill(torch.ones(len(at), len(at)).triu(1).bool(), -torch.inf)
        found = scores.softmax(-1) @ value.double().repeat_interleave(groups, 1)
        return found.to(value.dtype).transpose(1, 2), None

    return attend


@pytest.fixture
def by_hand(llama, documents):
    """by_hand(method) -> the sum of -ln p of each document's first tokens, by length."""

    @torch.no_grad()
    def measure(method):
        AttentionInterface.register(f"by-hand-{method}", attend_by_hand(method))
        AttentionMaskInterface.register(f"by-hand-{method}", lambda **_: None)
        model = AutoModelForCausalLM.from_pretrained(
            llama, dtype=torch.float64, attn_implementation=f"by-hand-{method}"
        )
        sums = dict.fromkeys(LENGTHS, 0.0)
        for document in documents.kept:
            ids = torch.from_numpy(document.ids[: LENGTHS[-1]].astype(np.int64))
            logs = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
            for length in LENGTHS:
                sums[length] -= logs[torch.arange(length - 1), ids[1:length]].sum().item()
        return sums

    return measure


@pytest.fixture
def patched(ropecli, llama, tmp_path):
    def patch(method):
        assert ropecli("patch", llama, "--method", method, "--factor", 4, "-o", tmp_path / method).code == 0
        return tmp_path / method

    return patch


@pytest.fixture
def evaluate(ropecli, corpus):
    """evaluate(command, folder, ...) -> the reports."""

    def call(command, folder, *options):
        fixed = ["--data", corpus, "--lengths", ",".join(map(str, LENGTHS)), "--max-documents", 4, "--json"]
        outcome = ropecli(command, folder, *fixed, *options)
        assert outcome.code == 0, outcome.err
        assert "instead of chunks" not in outcome.err
        return json.loads(outcome.out)

    return call


def nlls(report):
    return [row["nll"] * row["tokens"] for row in report["rows"]]


@pytest.mark.parametrize("method", METHODS)
def test_written_in_memory_and_by_hand_the_losses_are_the_same(method, llama, patched, evaluate, by_hand):
    expected = pytest.approx(list(by_hand(method).values()), rel=1e-5)
    in_memory = ["--method", method, "--factor", 4]
    report = evaluate("eval-ppl", patched(method))
    assert (report["method"], report["factor"], report["in_memory"]) == (method, 4.0, False)
    assert nlls(report) == expected
    for options in ([], ["--chunk", 17, "--batch-size", 4]):
        assert nlls(evaluate("eval-ppl", llama, *in_memory, *options)) == expected
    assert nlls(evaluate("eval-ppl", llama))[-1] != pytest.approx(nlls(report)[-1], rel=2e-3), "the method shows"


def test_compared_methods_do_not_affect_each_other(llama, evaluate):
    methods = ["none", "rerope", "dynamic", "streaming"]
    forward, backward = (
        {report["method"]: nlls(report) for report in evaluate("compare", llama, "--methods", ",".join(order))}
        for order in (methods, methods[::-1])
    )
    assert forward == backward
    assert forward["rerope"] == nlls(evaluate("eval-ppl", llama, "--method", "rerope", "--factor", 4))
    assert all(losses[-1] != other[-1] for losses, other in itertools.combinations(forward.values(), 2))
