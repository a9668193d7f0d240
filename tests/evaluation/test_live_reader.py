"""What LiveReader reads has the probability that a plain forward pass of stock transformers gives it.

In chunks, in batches, from a prompt's KV cache. Where the cache is not exact, it warns and reads in one pass.
"""

import numpy as np
import pytest
import torch
from tiny_settings import LATENT

from ropecli.errors import CheckpointError
from ropecli.evaluation.readers import live
from ropecli.evaluation.readers.live import LiveReader
from ropecli.options import PROTOCOLS

LAYERS = ["sliding_attention", "full_attention"]
TYPES = {
    "llama": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "final_logit_softcapping": 5.0, "sliding_window": 32, "layer_types": LAYERS},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "gpt_neox": {"rotary_pct": 0.5},
    "deepseek_v3": LATENT,  # and experts
    # its base_model_prefix names another decoder than it has
    "llama4_text": {"head_dim": 32, "intermediate_size_mlp": 96, "num_local_experts": 2},
}
IDS = torch.from_numpy(np.random.default_rng(0).integers(1, 512, (2, 200)))
LENGTHS = [24, 64, 100]
PROMPT = IDS[0, :90].numpy()
ANSWERS = ((5, 6, 7), (8, 9, 10), (11,), (5, 6, 8), (12, 13, 14, 15))


def documents_of(uneven, protocol):
    whole = protocol == "sliding"
    return uneven(*((110, 109, 64, 41, 3, 150) if whole else (100, 129, 101, 150)))


def assert_close(cells, expected, rel):
    for cell, other in zip(cells, expected, strict=True):
        assert cell.sums == pytest.approx(other.sums, rel=rel)
        assert cell.weights == other.weights
        assert cell.bits_per_byte == pytest.approx(other.bits_per_byte, rel=rel)


@pytest.fixture(scope="module", params=TYPES)
def model(request, build, loaded):
    return loaded(build(request.param, **TYPES[request.param]))


@pytest.fixture(scope="module")
def at_once(model, plain_nll):
    return np.stack([plain_nll(model, row) for row in IDS])


def test_every_token_scores_as_in_one_pass(model, at_once, caplog):
    reader = LiveReader(model)
    for options in ({}, {"chunk": 7}, {"chunk": 50}, {"chunk": 75}, {"targets": 1}, {"targets": 150, "chunk": 32}):
        expected = at_once[:, -options.get("targets", 199) :]
        np.testing.assert_allclose(reader.nll(IDS, **options).numpy(), expected, rtol=1e-4, atol=1e-4)
    for chunk in (7, 75):
        reader = LiveReader(model, chunk=chunk)
        reader.prepare(IDS[0].numpy(), 200)
        assert reader.cache_is_exact
    assert not caplog.records


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
        LiveReader(model)


@pytest.mark.parametrize(
    ("checkpoint", "protocol"),
    [*(("gemma3_text", name) for name in PROTOCOLS if name != "recall"), ("dynamic", "sliding")],
)
def test_batches_and_chunks_give_what_one_window_per_pass_gives(
    checkpoint, protocol, llama, sliding_gemma, patched, loaded, uneven, evaluate, caplog
):
    documents = documents_of(uneven, protocol)
    model = loaded(sliding_gemma if checkpoint == "gemma3_text" else patched(llama, "dynamic"))
    expected = evaluate(model, documents, LENGTHS, protocol)
    assert_close(evaluate(model, documents, LENGTHS, protocol, batch_size=3), expected, 1e-5)
    assert_close(evaluate(model, documents, LENGTHS, protocol, batch_size=3, chunk=23), expected, 1e-4)
    sentences = [sentence for sentence in caplog.messages if "chunks" in sentence]
    assert ["frequencies depend on the length" in sentence for sentence in sentences] == [True] * (
        checkpoint == "dynamic"
    )


def test_logits_of_a_batch_never_exist_all_at_once(llama, loaded, uneven, evaluate, monkeypatch):
    model, sizes, documents = loaded(llama), [], uneven(100, 100, 100)
    expected = evaluate(model, documents, LENGTHS)
    monkeypatch.setattr(live, "_LOGITS_AT_ONCE", 512 * 10)
    model.lm_head.register_forward_hook(lambda module, arguments, output: sizes.append(output.numel()))
    assert_close(evaluate(model, documents, LENGTHS, batch_size=3), expected, 1e-5)
    assert max(sizes[4:]) <= 512 * 10  # the first ones: SplitModel's probe of 16 tokens


@pytest.mark.parametrize("fault", ["raises", "shifts"])
def test_a_failing_cache_is_not_used(fault, llama, loaded, uneven, evaluate, expected, monkeypatch, caplog):
    decode_on = live.SplitModel.decode_on

    def failing(self, ids, cache):
        if cache is None:
            return decode_on(self, ids, None)
        if fault == "raises":
            raise NotImplementedError("no cache")
        positions = torch.arange(ids.shape[1])[None] + cache.get_seq_length() + 1
        return self.decoder(input_ids=ids, past_key_values=cache, use_cache=True, position_ids=positions)

    monkeypatch.setattr(live.SplitModel, "decode_on", failing)
    model, documents = loaded(llama), uneven(100, 120)
    cells = evaluate(model, documents, [24, 100], chunk=30)
    (sentence,) = caplog.messages
    assert "one pass instead of chunks of 30 tokens" in sentence
    assert "cache" in sentence
    assert cells == evaluate(model, documents, [24, 100])
    reader = prepared(model, chunk=16)
    assert not reader.cache_is_exact
    np.testing.assert_allclose(ranked(reader), expected(llama), rtol=0, atol=1e-4)


def test_a_cache_that_forgets_beyond_the_check_is_found(llama, loaded, uneven, edited, evaluate):
    """A stray sliding_window: stock transformers crops a Llama's cache by it, and its attention does not know it.

    The check reads two and a half chunks; a window that is longer than these shows only after them.
    """
    documents, model = uneven(290, 200), loaded(edited(llama, sliding_window=100))
    assert_close(evaluate(model, documents, [200], chunk=30), evaluate(model, documents, [200]), 1e-4)


# Answers.


@pytest.fixture(scope="module")
def expected(plain_nll, loaded):
    """expected(folder) -> ln p of each answer, from a fresh model each."""

    def score(folder):
        losses = [plain_nll(loaded(folder), [*PROMPT, *answer])[-len(answer) :].sum() for answer in ANSWERS]
        return -np.array(losses)

    return score


def prepared(model, **options):
    reader = LiveReader(model, **options)
    reader.prepare(PROMPT, len(PROMPT) + 4, answers=True)
    return reader


def ranked(reader, prompt=PROMPT):
    (values,) = reader.log_probabilities([(prompt, ANSWERS)])
    return values


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_answers_have_the_probability_of_a_plain_pass(build, loaded, expected, name, monkeypatch):
    """From the prompt's cache, and read together with the prompt."""
    folder = build(name, **TYPES[name])
    model, values = loaded(folder), expected(folder)
    for chunk, at_once in ((None, 2**31), (7, 2**31), (90, 1)):
        monkeypatch.setattr(live, "_COPIED_AT_ONCE", at_once)
        monkeypatch.setattr(live, "_TOKENS_AT_ONCE", at_once)
        reader = prepared(model, chunk=chunk)
        assert reader.cache_is_exact
        for _ in range(2):  # nothing remains of the first
            np.testing.assert_allclose(ranked(reader), values, rtol=0, atol=1e-4)
        reader.cache_is_exact = False
        np.testing.assert_allclose(ranked(reader), values, rtol=0, atol=1e-4)


def test_a_stock_dynamic_checkpoint_reads_each_prompt_afresh(llama, patched, loaded, expected):
    folder = patched(llama, "dynamic")
    reader = prepared(loaded(folder), chunk=16)
    assert reader.follows_length
    ranked(reader, np.tile(PROMPT, 3))  # a longer pass, which stock transformers remembers
    np.testing.assert_allclose(ranked(reader), expected(folder), rtol=0, atol=1e-4)


def test_generated_answers_are_those_of_transformers(llama, loaded):
    model = loaded(llama)
    model.generation_config.eos_token_id = None
    prompts = [PROMPT, IDS[1, :90].numpy(), IDS[1, :70].numpy()]
    expected = [
        model.generate(torch.from_numpy(ids)[None], max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
        for ids in prompts
    ]
    reader = prepared(model, chunk=16, batch_size=2)
    assert reader.cache_is_exact
    assert reader.generate(prompts, 12, lambda index, tokens: False) == expected
    reader.cache_is_exact = False
    assert reader.generate(prompts, 12, lambda index, tokens: False) == expected
    # each ends by itself, and the others stay the same
    early = reader.generate(prompts, 12, lambda index, tokens: len(tokens) == 3 * (index + 1))
    assert early == [tokens[: 3 * (index + 1)] for index, tokens in enumerate(expected)]
    model.generation_config.eos_token_id = [expected[0][4], 511]
    assert reader.generate(prompts[:1], 12, lambda index, tokens: False) == [
        expected[0][: expected[0].index(expected[0][4])]
    ]
