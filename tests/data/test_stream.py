"""The stream of a recipe: mixed, resumable, with a summary and a fingerprint."""

import copy
import json
import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from ropecli.data.sequences import UNSCORED
from ropecli.data.sources import read_texts
from ropecli.errors import DataError

END = 0
"""The tiny tokenizer's only special token, <s>."""


def joined(batches):
    return [np.concatenate([getattr(batch, name) for batch in batches]) for name in ("ids", "labels", "positions")]


@pytest.fixture(scope="session")
def short_texts(tmp_path_factory):
    """Forty short files and two long ones, of words that the other corpus knows too."""
    folder = tmp_path_factory.mktemp("short")
    for at in range(40):
        (folder / f"{at:02}.txt").write_text("ba de fi " * (at + 1))
    for at in range(2):
        (folder / f"long{at}.txt").write_text("go ku bal " * 150)
    return folder


@pytest.fixture(scope="session")
def ids_of(tokenizer):
    return lambda folder: [tokenizer(text)["input_ids"] for _, text in read_texts(str(folder))]


@pytest.mark.parametrize("positions", ["full", "pose", "randomized"])
def test_any_batch_is_the_same_whenever_it_is_asked_for(stream_of, source, corpus, short_texts, positions):
    def stream():
        kinds = ("long", "concat") if positions != "full" else ("long", "packed")
        sources = [source(folder, sequences=kind) for folder, kind in zip((corpus, short_texts), kinds, strict=True)]
        return stream_of(*sources, positions=positions, window=200)

    read_on = stream()
    whole = joined([read_on.batch(range(at, at + 7)) for at in range(0, 2100, 7)])
    jumping = stream()
    for at, size in ((1990, 30), (3, 1), (997, 8), (0, 2), (2000, 100)):
        batch = jumping.batch(range(at, at + size))
        for name, expected in zip(("ids", "labels", "positions"), whole, strict=True):
            np.testing.assert_array_equal(getattr(batch, name), expected[at : at + size])


def test_sources_have_their_weights_and_each_epoch_all_their_sequences(stream_of, source, corpus, short_texts):
    long, packed = source(corpus, weight=3), source(short_texts, weight=1, sequences="packed")
    stream, alone = stream_of(long, packed), [stream_of(long), stream_of(packed)]
    assert len(stream) == sum(map(len, alone))
    of_each = [sorted(map(tuple, one.batch(range(len(one))).ids.tolist())) for one in alone]
    assert not set(of_each[0]) & set(of_each[1])  # guards: a sequence tells its source
    batch = stream.batch(range(4000))
    is_packed = np.array([tuple(row) in set(of_each[1]) for row in batch.ids.tolist()])
    assert is_packed.reshape(4, 1000).sum(axis=1).tolist() == [250] * 4
    for rows, expected in ((batch.ids[~is_packed], of_each[0]), (batch.ids[is_packed], of_each[1])):
        for start in range(0, len(rows) - len(expected) + 1, len(expected)):
            assert sorted(map(tuple, rows[start : start + len(expected)].tolist())) == expected
    assert (batch.positions[~is_packed] == np.arange(16)).all()
    assert (batch.positions[is_packed][:, 1:] == 0).any()


class TestSeparators:
    def text_of(self, stream):
        """The sequences of `concat` are consecutive in its layout; here in that order."""
        part = stream._parts[0]
        return [token for index in range(len(part)) for token in part.row(index).ids.tolist()]

    def test_an_end_stands_between_documents(self, stream_of, source, short_texts, ids_of):
        text = self.text_of(stream_of(source(short_texts, sequences="concat")))
        documents = ids_of(short_texts)
        assert not any(END in ids for ids in documents)  # guards: it comes from us
        found = "".join(map(chr, text)).split(chr(END))
        whole = {"".join(map(chr, ids)) for ids in documents}
        assert len(found) in (42, 43)
        assert set(found[:-1]) <= whole
        assert len(set(found)) > 38  # all documents, but the last, which may be cut

    @pytest.mark.parametrize("template", ["<s> $A", "$A <s>"])
    def test_a_tokenizer_that_marks_documents_itself_is_enough(
        self, stream_of, source, short_texts, tokenizer, template
    ):
        own = copy.deepcopy(tokenizer)
        own.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=[("<s>", 0)])
        stream = stream_of(source(short_texts, sequences="concat"), tokenizer=own)
        text = self.text_of(stream)
        assert text.count(END) in (41, 42)
        assert (END, END) not in pairwise(text)


class TestConversations:
    @pytest.fixture(scope="class")
    def chatting(self, tokenizer, chat_template):
        own = copy.deepcopy(tokenizer)
        own.chat_template = chat_template
        return own

    @pytest.fixture(scope="class")
    def chat_stream(self, stream_of, source, chatting):
        def make(data, *, length=16, tokenizer=chatting, positions="full", **keys):
            return stream_of(source(data, **keys), length=length, tokenizer=tokenizer, positions=positions, window=200)

        return make

    @pytest.mark.parametrize("positions", ["full", "pose", "randomized"])
    @pytest.mark.parametrize("sequences", ["long", "concat"])
    def test_every_sequence_has_tokens_to_train_on(self, chat_stream, chat, sequences, positions):
        stream = chat_stream(chat, sequences=sequences, positions=positions)
        batch = stream.batch(range(2 * len(stream)))
        scored = batch.labels != UNSCORED
        assert scored.any(axis=1).all()
        np.testing.assert_array_equal(batch.labels[:, :-1][scored[:, :-1]], batch.ids[:, 1:][scored[:, :-1]])
        assert not scored[:, -1].any()

    def test_documents_and_tokens_to_train_on_are_reported(self, chat_stream, chat, chatting):
        stream = chat_stream(chat, sequences="packed", length=600)
        rows = [json.loads(line)["messages"] for line in chat.read_text().splitlines()]
        answers = [f"{answer['content']}<s>" for messages in rows for answer in messages[1::2]]
        tokens = sum(len(ids) for ids in chatting(answers)["input_ids"])
        (said,) = stream.summary()
        assert "from 12 of 12 documents" in said
        assert f"; {tokens / len(stream) / 600:.1%} of the tokens are trained on" in said
        (said,) = chat_stream(chat, sequences="packed").summary()
        assert re.search(r"; \d+ sequences without a token to train on are skipped", said)

    def test_another_choice_or_template_is_another_cache(self, chat_stream, chat, chatting):
        other = copy.deepcopy(chatting)
        other.chat_template = chatting.chat_template.replace("eos_token", "'!'")
        same = [chat_stream(chat), chat_stream(chat, train_on="assistant")]
        assert len({stream.fingerprint() for stream in same}) == 1
        others = [chat_stream(chat, train_on="all"), chat_stream(chat, tokenizer=other)]
        assert len({stream.fingerprint() for stream in [*same, *others]}) == 3

    def test_text_or_a_tokenizer_without_a_template_is_refused(self, chat_stream, chat, corpus, tokenizer):
        with pytest.raises(DataError, match=r"no chat template.*chat_template\.jinja"):
            chat_stream(chat, tokenizer=tokenizer)
        chat_stream(corpus)  # cached
        with pytest.raises(DataError, match=r"text00\.txt is text; train_on: all needs conversations"):
            chat_stream(corpus, train_on="all")

    def test_conversations_without_an_answer_are_refused(self, chat_stream, tmp_path):
        path = tmp_path / "questions.jsonl"
        path.write_text(json.dumps({"messages": [{"role": "user", "content": "ba de " * 40}]}))
        with pytest.raises(DataError, match="no token to train on"):
            chat_stream(path)


class TestCache:
    @pytest.fixture
    def counted(self, tokenizer, monkeypatch, tmp_path):
        """(tokenizer, texts that it was given), over a cache of its own."""
        monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "cache"))
        given = []

        class Counted(type(tokenizer)):
            def __call__(self, text, **options):
                given.extend([text] if isinstance(text, str) else text)
                return super().__call__(text, **options)

        return Counted(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="<s>"), given

    def test_the_second_run_tokenizes_nothing(self, stream_of, source, corpus, counted):
        tokenizer, given = counted
        first = stream_of(source(corpus), tokenizer=tokenizer)
        assert len(given) == 12
        other = stream_of(source(corpus, max_tokens=5000), length=100, seed=3, tokenizer=tokenizer)
        again = stream_of(source(corpus), tokenizer=tokenizer)
        assert len(given) == 12
        assert other.fingerprint() != first.fingerprint() == again.fingerprint()


class TestFingerprint:
    def test_it_does_not_know_where_the_text_lies(self, stream_of, source, corpus, tmp_path, monkeypatch):
        shutil.copytree(corpus, tmp_path / "copy")
        here = stream_of(source(corpus)).fingerprint()
        monkeypatch.setenv("ROPECLI_CACHE", str(tmp_path / "cache"))
        assert stream_of(source(tmp_path / "copy")).fingerprint() == here

    def test_everything_that_changes_a_batch_changes_it(self, stream_of, source, corpus, short_texts, tokenizer):
        own = copy.deepcopy(tokenizer)
        own.eos_token = None
        other_end = copy.deepcopy(tokenizer)
        other_end.eos_token = tokenizer.convert_ids_to_tokens(5)
        streams = [
            stream_of(source(corpus)),
            stream_of(source(corpus), seed=1),
            stream_of(source(corpus), length=17),
            stream_of(source(short_texts)),
            stream_of(source(corpus), source(short_texts)),
            stream_of(source(corpus), source(short_texts, weight=2.0)),
            stream_of(source(short_texts), source(corpus)),
            stream_of(source(corpus, sequences="packed")),
            stream_of(source(corpus, sequences="concat")),
            stream_of(source(corpus, sequences="concat"), tokenizer=own),
            stream_of(source(corpus, max_tokens=500)),
            stream_of(source(corpus, max_documents=5)),
            stream_of(source(corpus, long_from=10**6, keep_short=0.5)),
            stream_of(source(corpus, long_from=10**6, keep_short=0.6)),
            stream_of(source(corpus), positions="pose"),
            stream_of(source(corpus), positions="pose", pose_chunks=3),
            stream_of(source(corpus), positions="pose", window=65),
            stream_of(source(corpus), positions="randomized"),
            stream_of(source(short_texts, sequences="packed")),
            stream_of(source(short_texts, sequences="packed"), tokenizer=other_end),
        ]
        assert len({stream.fingerprint() for stream in streams}) == len(streams)


class TestSummary:
    def test_documents_used_dropped_and_cut_are_reported(self, stream_of, source, short_texts, ids_of):
        lengths = np.array([len(ids) for ids in ids_of(short_texts)])
        enough, cut = (lengths >= 48).sum(), ((lengths >= 48) & (lengths != 48)).sum()
        left = (lengths % 48)[lengths >= 48].sum() / lengths[lengths >= 48].sum()
        sequences = (lengths // 48).sum()
        (said,) = stream_of(source(short_texts), length=48).summary()
        assert said == (
            f"{short_texts}: {sequences} sequences (long) from {enough} of 42 documents, {enough / 42:.1%}; "
            f"{1 - enough / 42:.1%} of the documents are too short; {cut / enough:.1%} of those used are cut; "
            f"{left:.1%} of their tokens are unused."
        )

    def test_padding_is_reported(self, stream_of, source, short_texts):
        stream = stream_of(source(short_texts, sequences="packed"), length=400)
        batch = stream.batch(range(len(stream)))
        padding = (batch.ids == END).mean()
        assert padding > 0.001  # guards: the tiny tokenizer's texts have no <s> of their own
        assert f"; {padding:.1%} of the sequences is padding." in stream.summary()[0]
