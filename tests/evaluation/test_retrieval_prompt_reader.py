"""Read once or read whole, an answer has the probability that a plain forward pass of a fresh model gives it."""

import numpy as np
import pytest
import torch

from ropecli.evaluation.retrieval import prompt_reader
from ropecli.evaluation.retrieval.prompt_reader import PromptReader

ARCHITECTURES = {
    "llama": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "final_logit_softcapping": 5.0, "sliding_window": 16},
    "cohere": {"logit_scale": 0.25},
}
IDS = np.random.default_rng(0).integers(0, 512, 90)
ANSWERS = ((5, 6, 7), (8, 9, 10), (11,), (5, 6, 8), (12, 13, 14, 15))
TOKENS = len(IDS) + 4


@pytest.fixture(scope="module")
def expected(plain_nll, loaded):
    """expected(folder, prepare) -> ln p of each answer, from a fresh model each."""

    def score(folder, prepare=lambda model: None):
        values = []
        for answer in ANSWERS:
            model = loaded(folder)
            prepare(model)
            values.append(-plain_nll(model, [*IDS, *answer])[-len(answer) :].sum())
        return np.array(values)

    return score


@pytest.fixture(scope="module")
def dynamic(patched, llama):
    """A folder whose frequencies follow the length, in stock transformers."""
    return patched(llama, "dynamic")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_both_ways_give_what_a_plain_pass_gives(build, loaded, expected, name, monkeypatch):
    folder = build(name, **ARCHITECTURES[name])
    model, wanted = loaded(folder), expected(folder)
    for chunk, at_once in ((None, 2**31), (7, 2**31), (90, 1)):
        monkeypatch.setattr(prompt_reader, "_COPIED_AT_ONCE", at_once)
        monkeypatch.setattr(prompt_reader, "_TOKENS_AT_ONCE", at_once)
        reader = PromptReader(model, TOKENS, chunk=chunk)
        whole = reader.log_probabilities(IDS, ANSWERS)
        reader.check_cache(IDS)
        assert reader.once
        np.testing.assert_allclose(whole, wanted, rtol=0, atol=1e-4)
        for _ in range(2):  # nothing remains of the first
            np.testing.assert_allclose(reader.log_probabilities(IDS, ANSWERS), whole, rtol=0, atol=1e-4)


def test_a_stock_dynamic_checkpoint_is_read_whole_and_fresh(dynamic, loaded, expected):
    said = []
    reader = PromptReader(loaded(dynamic), TOKENS, chunk=16)
    reader.check_cache(IDS, said.append)
    assert reader.switching
    assert not reader.once
    assert len(said) == 1
    assert "16 tokens" in said[0]
    reader.log_probabilities(np.tile(IDS, 3), ANSWERS)  # a longer pass, that stock transformers remembers
    np.testing.assert_allclose(reader.log_probabilities(IDS, ANSWERS), expected(dynamic), rtol=0, atol=1e-4)


def test_a_model_that_ignores_its_cache_reads_the_whole_prompt(llama, loaded, expected):
    reader = PromptReader(loaded(llama), TOKENS, chunk=16)
    plain = reader.split.decode_on
    reader.split.decode_on = lambda ids, cache: plain(ids, None)  # forgets what it read
    said = []
    reader.check_cache(IDS, said.append)
    assert not reader.once
    assert len(said) == 1
    np.testing.assert_allclose(reader.log_probabilities(IDS, ANSWERS), expected(llama), rtol=0, atol=1e-4)


def greedy(reader, tokens=12):
    from itertools import islice

    return list(islice(reader.greedy(IDS), tokens))


def test_greedy_answers_are_those_of_generate(llama, loaded):
    model = loaded(llama)
    model.generation_config.eos_token_id = None
    wanted = model.generate(torch.from_numpy(IDS)[None], max_new_tokens=12, do_sample=False)[0, len(IDS) :].tolist()
    reader = PromptReader(model, TOKENS, chunk=16)
    assert greedy(reader) == wanted
    reader.check_cache(IDS)
    assert reader.once
    assert greedy(reader) == wanted
