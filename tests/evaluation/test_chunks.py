"""Chunks with a KV cache give the same losses as one pass; otherwise, a warning is printed and one pass is used."""

import numpy as np
import pytest
import torch

from ropecli.evaluation import scoring
from ropecli.evaluation.perplexity import evaluate_perplexity
from ropecli.evaluation.protocol_descriptions import PROTOCOLS
from ropecli.evaluation.scoring import TokenScorer

LAYERS = ["sliding_attention", "full_attention"]
LATENT = {  # attention by latent vectors, as DeepSeek's, and experts
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
TYPES = {
    "llama": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "final_logit_softcapping": 5.0, "sliding_window": 32, "layer_types": LAYERS},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "mistral": {"head_dim": 32, "sliding_window": 32},
    "gpt_neox": {"rotary_pct": 0.5},
    "deepseek_v3": LATENT,
}
HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "head_dim": 32}
IDS = torch.from_numpy(np.random.default_rng(0).integers(1, 512, (2, 200)))
BEGINNINGS = (100, 129)
WHOLE = (150, 110, 41, 3)


@pytest.fixture(scope="module", params=TYPES)
def model(request, build, loaded):
    return loaded(build(request.param, **TYPES[request.param]))


@pytest.fixture(scope="module")
def at_once(model, plain_nll):
    return np.stack([plain_nll(model, row) for row in IDS])


def test_every_token_scores_as_in_one_pass(model, at_once):
    for chunk in (None, 7, 75):
        scorer = TokenScorer(model, chunk)
        np.testing.assert_allclose(scorer(IDS).numpy(), at_once, rtol=1e-4, atol=1e-4)
        assert scorer.reads_by_chunks_as_at_once(IDS[:1])
    for targets in (1, 5, 150):
        nll = TokenScorer(model, 32)(IDS, targets)
        np.testing.assert_allclose(nll.numpy(), at_once[:, -targets:], rtol=1e-4, atol=1e-4)
    nll = TokenScorer(model, 50)(IDS, 199, reads_last=False)
    np.testing.assert_allclose(nll.numpy(), at_once, rtol=1e-4, atol=1e-4)


@pytest.fixture
def read():
    """read(model) -> the list in which it enters how many tokens its first layer is given at once."""

    def watch(model):
        lengths = []
        decoder = model.get_decoder()
        layers = decoder.layers if hasattr(decoder, "layers") else decoder.h
        layers[0].register_forward_pre_hook(lambda module, arguments: lengths.append(arguments[0].shape[1]))
        return lengths

    return watch


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_all_protocols_give_the_same_by_chunks(sliding_gemma, loaded, uneven, protocol):
    documents = uneven(*(WHOLE if protocol in ("sliding", "disjoint", "yarn") else BEGINNINGS))
    model, said = loaded(sliding_gemma), []
    expected = evaluate_perplexity(model, documents, [24, 64, 100], protocol=protocol)
    options = {"protocol": protocol, "chunk": 23, "batch_size": 3, "say": said.append}
    rows = evaluate_perplexity(model, documents, [24, 64, 100], **options)
    for row, other in zip(rows, expected, strict=True):
        assert row.document_nll == pytest.approx(other.document_nll, rel=1e-4)
        assert row.document_weights == other.document_weights
        assert row.bits_per_byte == pytest.approx(other.bits_per_byte, rel=1e-4)
    assert not [sentence for sentence in said if "chunks" in sentence]


def test_a_recurrent_state_is_read_in_one_pass_with_a_warning(build, loaded, uneven):
    model = loaded(build("bamba", attn_layer_indices=[1], **HYBRID))
    said, documents = [], uneven(100, 120)
    rows = evaluate_perplexity(model, documents, [24, 100], chunk=30, say=said.append)
    for row, expected in zip(rows, evaluate_perplexity(model, documents, [24, 100]), strict=True):
        assert row.document_nll == pytest.approx(expected.document_nll, rel=1e-4)
    assert len(said) == 1


@pytest.mark.parametrize("fault", ["it raises", "it shifts"])
def test_a_failing_cache_is_read_in_one_pass_with_a_warning(fault, llama, loaded, uneven, monkeypatch):
    decode_on = scoring.SplitModel.decode_on

    def failing(self, ids, cache):
        if fault == "it raises" and cache is not None:
            raise NotImplementedError("no cache")
        if fault == "it shifts" and cache is not None:
            return self.decoder(
                input_ids=ids,
                past_key_values=cache,
                use_cache=True,
                position_ids=torch.arange(ids.shape[1])[None] + cache.get_seq_length() + 1,
            )
        return decode_on(self, ids, cache)

    monkeypatch.setattr(scoring.SplitModel, "decode_on", failing)
    model, said, documents = loaded(llama), [], uneven(100, 120)
    rows = evaluate_perplexity(model, documents, [24, 100], chunk=30, say=said.append)
    assert rows == evaluate_perplexity(model, documents, [24, 100])
    (sentence,) = said
    assert "one pass instead of chunks of 30 tokens" in sentence
    assert "cache" in sentence


def test_frequencies_that_follow_the_length_want_one_pass(llama, patched, loaded, uneven):
    folder = patched(llama, "dynamic")
    said, documents = [], uneven(100, 120)
    rows = evaluate_perplexity(loaded(folder), documents, [24, 100], chunk=30, say=said.append)
    assert rows == evaluate_perplexity(loaded(folder), documents, [24, 100])
    (sentence,) = said
    assert "frequencies depend on the length" in sentence


def test_a_cache_that_forgets_beyond_the_trial_is_found_out(llama, loaded, uneven, edited):
    """A stray sliding_window: stock transformers crops a Llama's cache by it, and its attention knows nothing of it.

    The trial reads two and a half chunks; a window that is longer than these shows only after them.
    """
    documents = uneven(290, 200)
    model = loaded(edited(llama, sliding_window=100))
    expected = evaluate_perplexity(model, documents, [200])
    (row,) = evaluate_perplexity(model, documents, [200], chunk=30)
    assert row.document_nll == pytest.approx(expected[0].document_nll, rel=1e-4)
