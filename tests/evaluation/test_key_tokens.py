"""LongPPL: the key tokens and the loss on them, against a computation in float64 that shares no code with ours."""

import json
import math

import numpy as np
import pytest

from ropecli.data.sources import Source
from ropecli.errors import DataError
from ropecli.evaluation.processes import Workers
from ropecli.evaluation.protocols import ShortContext
from ropecli.evaluation.subject import LiveReaders
from ropecli.evaluation.tasks import keys as key_tokens
from ropecli.evaluation.tasks.keys import KeyDocument, Keys, fingerprint, get_keys, positions_within, read_marked
from ropecli.evaluation.texts import TextChoice

LENGTH = 200
SHORT = ShortContext(64, 16)  # of a pretraining length of 64 tokens


@pytest.fixture(scope="module")
def texts(corpus):
    return dict(list(Source(str(corpus)).texts())[:3])


@pytest.fixture(scope="module")
def short_words(corpus):
    """A tokenizer of 300 tokens, with <s> before every text: mostly letters and pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator((path.read_text() for path in sorted(corpus.iterdir())), trainer)
    bpe.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="<s>")


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
def test_longppl_is_that_of_brute_force_with_another_tokenizer(
    build, llama, loaded, plain_nll, corpus, texts, tokenizer, short_words, evaluate
):
    """The evaluator reads one tokenizer's tokens; the judged model, with <s>, is scored on its own within them."""
    judged = build("llama", head_dim=32, vocab_size=512, num_key_value_heads=1)
    choice, readers = TextChoice(Source(str(corpus)), max_documents=3), LiveReaders({"device": "cpu"}, batch_size=3)
    keys, _ = get_keys(str(llama), None, choice, [LENGTH], readers, Workers(), drop_rare=False)
    documents = read_marked(choice, short_words, keys)
    cells = evaluate(loaded(judged), documents, [64, 900], "longppl", batch_size=2)

    evaluator, model = loaded(llama, "float64"), loaded(judged, "float64")
    long, windowed, text_bytes = [], [], 0
    for text in texts.values():
        whole = tokenizer(text, return_offsets_mapping=True)
        spans = whole["offset_mapping"][:LENGTH]
        is_key = np.zeros(len(text), dtype=bool)
        for position in brute_force_keys(evaluator, plain_nll, whole["input_ids"][:LENGTH]):
            is_key[slice(*spans[position])] = True
        own = short_words(text[: spans[-1][1]], return_offsets_mapping=True)
        assert len(own["input_ids"]) <= 900
        nll = plain_nll(model, own["input_ids"])
        for position, (start, stop) in enumerate(own["offset_mapping"]):
            if start < stop and is_key[start:stop].all():
                long.append(nll[position - 1])
                text_bytes += stop - start
                begin = max(0, math.ceil((position - 63) / 32) * 32)
                ids = [0, *own["input_ids"][begin + 1 : position + 1]]
                windowed.append(plain_nll(model, ids)[-1])
    assert len(long) > 30
    assert [cell.tokens for cell in cells] == [len(long)] * 2
    assert [cell.value for cell in cells] == pytest.approx([np.mean(windowed), np.mean(long)], rel=1e-5)
    assert cells[1].bits_per_byte == pytest.approx(sum(long) / math.log(2) / text_bytes, rel=1e-5)
    assert np.abs(np.array(cells[0].sums) / cells[1].sums - 1).min() > 1e-3  # else the windows show nothing


def test_keys_of_another_text_are_refused(texts):
    name, text = next(iter(texts.items()))
    keys = Keys("e", "d", 9, 4, 1, 2.0, 2.0, (KeyDocument(name, fingerprint(text), 20, ()),))
    assert list(keys.select(texts.items())) == [(name, text[:20])]
    with pytest.raises(DataError, match=f"another text of {name}"):
        list(keys.select([(name, text + " ")]))
    with pytest.raises(DataError, match=f"{name} is not in --data"):
        list(keys.select([("other", text)]))


def test_tokens_within_intervals_of_characters():
    """Two tokens share the character at 4; a special token has no text."""
    spans = np.array([[0, 0], [0, 4], [4, 5], [4, 5], [5, 9], [9, 12], [0, 0]])
    assert positions_within(spans, ((4, 9),)).tolist() == [2, 3, 4]
    assert positions_within(spans, ((0, 4), (9, 12)), 1).tolist() == [1, 5]
    assert positions_within(spans, ((4, 8),)).tolist() == [2, 3]
    assert key_tokens._merged(spans[[1, 2, 3, 5, 6]]) == ((0, 5), (9, 12))


def test_only_an_undamaged_file_of_keys_is_read(tmp_path):
    keys = Keys("e", "d", 9, 4, 1, 2.0, 2.0, (KeyDocument("a", "f", 20, ((1, 3), (7, 20))),))
    key_tokens.write_keys(tmp_path / "keys.json", keys)
    assert key_tokens.read_keys(tmp_path / "keys.json") == keys
    assert json.loads((tmp_path / "keys.json").read_text())["documents"][0]["intervals"] == [[1, 3], [7, 20]]
    damaged = (tmp_path / "keys.json").read_text().replace("20", "19")
    for text, reason in (("{}", "Field required"), ("[", "cannot be read"), (damaged, "does not match its checksum")):
        (tmp_path / "keys.json").write_text(text)
        with pytest.raises(DataError, match=reason):
            key_tokens.read_keys(tmp_path / "keys.json")
