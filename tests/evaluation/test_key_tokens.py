"""LongPPL: the key tokens and the loss on them, against a computation in float64 that shares no code with ours."""

import copy
import json
import math

import numpy as np
import pytest

from ropecli.data.sources import Source
from ropecli.errors import DataError
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.protocols import ShortContext
from ropecli.evaluation.request import PerplexityOptions
from ropecli.evaluation.subject import LiveReaderFactory
from ropecli.evaluation.tasks import key_tokens
from ropecli.evaluation.tasks.key_tokens import DocumentKeyTokens, KeyTokens, get_key_tokens, read_marked
from ropecli.hashing import digest

LENGTH = 200
SHORT = ShortContext(64, 16)  # of a pretraining length of 64 tokens


@pytest.fixture(scope="module")
def texts(corpus):
    return dict(list(Source(str(corpus)).texts())[:3])


@pytest.fixture(scope="module")
def begun(tokenizer):
    """The tokenizer with <s> before every text."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(tokenizer)
    template = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


@pytest.fixture
def thresholds(monkeypatch):
    """A model with random weights has no loss below 2 nats; these make about every tenth token key."""
    monkeypatch.setattr(key_tokens, "MIN_GAIN", 0.5)
    monkeypatch.setattr(key_tokens, "MAX_LOSS", 8.0)


def brute_force_keys(model, plain_nll, ids):
    """Positions of key tokens: token by token, each with its own short pass."""
    long = plain_nll(model, ids)
    found = []
    for position in range(SHORT.tokens, len(ids)):
        start = (position - SHORT.tokens) // SHORT.stride * SHORT.stride
        short = plain_nll(model, ids[start : position + 1])[-1]
        if short - long[position - 1] > 0.5 and long[position - 1] < 8.0:
            found.append(position)
    return found


@pytest.mark.usefixtures("thresholds")
def test_longppl_is_that_of_brute_force(build, loaded, plain_nll, corpus, texts, begun, evaluate, options_of):
    folder, judged = build("llama", head_dim=32), build("llama", head_dim=32, num_key_value_heads=1)
    begun.save_pretrained(folder)
    options = options_of(PerplexityOptions, data=str(corpus), max_documents=3, evaluator=str(folder))
    factory = LiveReaderFactory({"device": "cpu"}, batch_size=3)
    keys = get_key_tokens(options, None, [LENGTH], factory, Workers(), {"judged": begun})
    documents = read_marked(options, begun, keys)
    cells = evaluate(loaded(judged), documents, [64, LENGTH], "longppl", batch_size=2)

    evaluator, model = loaded(folder, "float64"), loaded(judged, "float64")
    long, windowed, text_bytes = [], [], 0
    for text in texts.values():
        whole = begun(text, return_offsets_mapping=True)
        ids = whole["input_ids"][:LENGTH]
        nll = plain_nll(model, ids)
        for position in brute_force_keys(evaluator, plain_nll, ids):
            long.append(nll[position - 1])
            start, stop = whole["offset_mapping"][position]
            text_bytes += stop - start
            begin = max(0, math.ceil((position - 63) / 32) * 32)
            windowed.append(plain_nll(model, [0, *ids[begin + 1 : position + 1]])[-1])
    assert len(long) > 30
    assert [cell.tokens for cell in cells] == [len(long)] * 2
    assert [cell.value for cell in cells] == pytest.approx([np.mean(windowed), np.mean(long)], rel=1e-5)
    assert cells[1].bits_per_byte == pytest.approx(sum(long) / math.log(2) / text_bytes, rel=1e-5)
    assert np.abs(np.array(cells[0].sums) / cells[1].sums - 1).min() > 1e-3  # else the windows show nothing


def keys_of(name, sha256, *positions):
    return KeyTokens("e", "d", "v", 20, 4, 1, 2.0, 2.0, (DocumentKeyTokens(name, 20, sha256, positions),))


def test_keys_of_another_text_are_refused(corpus, texts, tokenizer, options_of):
    name, choice = next(iter(texts)), options_of(PerplexityOptions, data=str(corpus))
    with pytest.raises(DataError, match=f"another text of {name}"):
        read_marked(choice, tokenizer, keys_of(name, "f", 7))
    ids = np.array(tokenizer(texts[name])["input_ids"][:20])
    [document] = read_marked(choice, tokenizer, keys_of(name, digest(ids), 7)).kept
    assert (document.ids.tolist(), document.key_tokens.tolist()) == (ids.tolist(), [7])
    with pytest.raises(DataError, match="other is not in --data"):
        read_marked(choice, tokenizer, keys_of("other", "f", 7))


def test_added_tokens_make_no_other_vocabulary(tokenizer):
    padded = copy.deepcopy(tokenizer)
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert key_tokens.vocabulary_digest(padded) == key_tokens.vocabulary_digest(tokenizer)


def test_only_an_undamaged_file_of_keys_is_read(tmp_path):
    keys = keys_of("a", "f", 3, 19)
    key_tokens.write_key_tokens(tmp_path / "keys.json", keys)
    assert key_tokens.read_key_tokens(tmp_path / "keys.json") == keys
    assert json.loads((tmp_path / "keys.json").read_text())["documents"][0]["positions"] == [3, 19]
    damaged = (tmp_path / "keys.json").read_text().replace("19", "18")
    for text, reason in (("{}", "Field required"), ("[", "cannot be read"), (damaged, "does not match its checksum")):
        (tmp_path / "keys.json").write_text(text)
        with pytest.raises(DataError, match=reason):
            key_tokens.read_key_tokens(tmp_path / "keys.json")
