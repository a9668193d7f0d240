"""Windows read several at a time give what they give one by one."""

import pytest
import torch

from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.evaluation.protocol_descriptions import PROTOCOLS

WHOLE = (110, 109, 64, 41, 3, 150)
BEGINNINGS = (100, 129, 101, 150)


def rows_of(model, documents, protocol, **options):
    return evaluate_perplexity(model, documents, [24, 64, 100], protocol=protocol, **options)


@pytest.fixture(scope="module", params=["gemma3_text", "dynamic"])
def model(request, llama, sliding_gemma, patched, loaded):
    return loaded(sliding_gemma if request.param == "gemma3_text" else patched(llama, "dynamic"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_batch_gives_what_its_windows_give_alone(model, uneven, protocol):
    documents = uneven(*(WHOLE if protocol in ("sliding", "disjoint", "yarn") else BEGINNINGS))
    alone = rows_of(model, documents, protocol)
    for row, expected in zip(rows_of(model, documents, protocol, batch_size=3), alone, strict=True):
        assert row.document_nll == pytest.approx(expected.document_nll, rel=1e-5)
        assert row.document_weights == expected.document_weights
        assert row.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-5)
        assert [(one.start, one.tokens) for one in row.by_context] == [
            (one.start, one.tokens) for one in expected.by_context
        ]


def test_logits_of_a_batch_never_exist_all_at_once(llama, loaded, uneven, monkeypatch):
    from ropecli.evaluation import scoring

    monkeypatch.setattr(scoring, "_LOGITS_AT_ONCE", 512 * 10)
    model, seen = loaded(llama), []
    model.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output.numel()))
    documents = uneven(100, 100, 100)
    small = rows_of(model, documents, "prefix", batch_size=3)
    assert sorted(set(seen[4:]))[-1] <= 512 * 10  # the first ones: SplitModel's probe of 16 tokens
    monkeypatch.undo()
    for row, expected in zip(small, rows_of(model, documents, "prefix"), strict=True):
        assert torch.tensor(row.document_nll).numpy() == pytest.approx(expected.document_nll, rel=1e-5)
