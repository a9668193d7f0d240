"""Calibration documents: parted, in an order of the seed, none of them on both sides; needles."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from ropecli.data.sources import Source
from ropecli.errors import DataError
from ropecli.evaluation.driver import read
from ropecli.evaluation.protocols import ShortContext
from ropecli.evaluation.readers.live import LiveReader
from ropecli.evaluation.retrieval_prompts import STYLES
from ropecli.evaluation.tasks import keys as key_tokens
from ropecli.tuning.calibration import Calibration, hide_needles, mark_keys, read_calibration

TARGET = 100


@pytest.fixture
def texts(tmp_path, corpus):
    """texts(parts, repeated=...) -> a folder of `parts` different documents, the first of them repeated."""

    def write(parts, repeated=0):
        words = " ".join(path.read_text() for path in sorted(corpus.iterdir())).split()
        folder = tmp_path / f"texts-{parts}-{repeated}"
        folder.mkdir()
        for index in range(parts + repeated):
            start = 150 * (index if index < parts else 0)
            # what is beyond the target differs, and is not read
            text = " ".join(words[start : start + 150]) + (" end" if index < parts else f" {words[index]} end")
            (folder / f"{index:03}.txt").write_text(text)
        return str(folder)

    return write


def ids_of(calibration):
    scored = [tuple(document.ids.tolist()) for document in calibration.evaluated.kept]
    return scored, [tuple(row) for row in calibration.sequences.tolist()]


@pytest.mark.parametrize(("parts", "count"), [(4, 2), (30, 7), (70, 16)])
def test_a_quarter_of_the_documents_up_to_sixteen_is_scored(texts, tokenizer, parts, count):
    calibration = read_calibration(Source(texts(parts)), tokenizer, TARGET, most=None, seed=0)
    scored, learned = ids_of(calibration)
    assert (len(scored), len(learned)) == (count, parts - count)
    assert calibration.sequences.dtype == torch.int64
    assert calibration.sequences.shape[1] == TARGET
    assert {len(ids) for ids in scored} == {TARGET}
    assert len({*scored, *learned}) == parts


def test_the_seed_determines_the_order(texts, tokenizer):
    folder = texts(16)
    first, same, other = (
        read_calibration(Source(folder), tokenizer, TARGET, most=None, seed=seed) for seed in (0, 0, 1)
    )
    assert ids_of(first) == ids_of(same) != ids_of(other)
    assert first.fingerprint() == same.fingerprint() != other.fingerprint()


def test_repeated_documents_count_once(texts, tokenizer):
    folder = texts(12, repeated=12)
    for seed in range(4):
        scored, learned = ids_of(read_calibration(Source(folder), tokenizer, TARGET, most=None, seed=seed))
        assert len(scored) + len(learned) == 12
        assert not set(scored) & set(learned)


def test_too_few_documents_are_an_error(texts, tokenizer):
    with pytest.raises(DataError, match="has too few distinct documents of 100 tokens: 3 of 8; expected at least 4"):
        read_calibration(Source(texts(3, repeated=5)), tokenizer, TARGET, most=None, seed=0)
    with pytest.raises(DataError, match="distinct documents of 100 tokens: 3 of 3;"):
        read_calibration(Source(texts(8)), tokenizer, TARGET, most=3, seed=0)


def test_the_held_out_text_is_refused(tokenizer):
    with pytest.raises(DataError, match="calibrate on 'demo-train'"):
        read_calibration(Source("demo"), tokenizer, TARGET, most=None, seed=0)


def test_the_score_on_needles_is_the_loss_on_their_keys(llama, documents, evaluator, tokenizer):
    """By hand: each text begins with its key and ends with it, and the key's tokens alone are scored."""
    judge = evaluator(3)
    plain = Calibration(judge.documents, torch.zeros(1, 128, dtype=torch.int64))
    hidden = hide_needles(plain, tokenizer, STYLES["code"], 64, 128, seed=0)
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    losses = {}
    for length, some in ((64, hidden.short), (128, hidden.evaluated)):
        sums, count = 0.0, 0
        for needle, plain_document in zip(some.kept, judge.documents.kept, strict=True):
            assert len(needle.ids) == length
            text = tokenizer.decode(needle.ids, skip_special_tokens=True)
            name, key = re.match(r"\s*(\w+_KEY) = (\d{5})\n", text).groups()
            assert text.endswith(f"\n{name} = {key}")
            assert text.count(key) == 2
            assert tokenizer.decode(plain_document.ids[5:20]) in text
            assert tokenizer.decode(needle.ids[-hidden.targets :]).strip() in key
            with torch.no_grad():
                logs = model(torch.from_numpy(needle.ids)[None]).logits[0].double().log_softmax(-1)
            for place in range(length - hidden.targets, length):
                sums, count = sums - float(logs[place - 1, needle.ids[place]]), count + 1
        losses[length] = sums / count
    judge = replace(judge, documents=hidden.evaluated, short=hidden.short, targets=hidden.targets)
    score, _ = judge.score(model, "needles")
    assert (score.pretraining, score.target) == pytest.approx((losses[64], losses[128]), rel=1e-5)
    assert score.objective == pytest.approx(losses[128] + 0.25 * losses[64], rel=1e-5)


def test_the_score_on_key_tokens_is_the_loss_on_them_and_on_the_last_tokens_at_the_pretraining_length(
    llama, evaluator, monkeypatch
):
    """By hand: the losses at the positions that FindKeys returns; without keys, the tail of 64 tokens."""
    monkeypatch.setattr(key_tokens, "MIN_GAIN", 0.3)  # a model with random weights has no loss below 2 nats
    monkeypatch.setattr(key_tokens, "MAX_LOSS", 8.0)
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    judge, context = evaluator(6), ShortContext(16, 8)
    marked = mark_keys(Calibration(judge.documents, torch.zeros(1, 128)), model, context, 64)
    positions = read(key_tokens.FindKeys(judge.documents, context, 128), LiveReader(model)).values()
    losses, kept = [], []
    for document, keys in zip(judge.documents.kept, positions, strict=True):
        with torch.no_grad():
            logs = model(torch.from_numpy(document.ids)[None]).logits[0].double().log_softmax(-1)
        losses += [-float(logs[at - 1, document.ids[at]]) for at in keys]
        kept += [document] * bool(keys)
    assert 0 < len(kept) == len(marked.evaluated.kept)
    tail = replace(judge, documents=replace(judge.documents, kept=tuple(kept))).score(model, "tail")[0]
    score, _ = replace(judge, documents=marked.evaluated, short=marked.short).score(model, "keys")
    assert score.target == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert score.pretraining == pytest.approx(tail.pretraining, rel=1e-5)
